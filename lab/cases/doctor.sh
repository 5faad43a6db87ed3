# gpunvme doctor on the real sysfs of what QEMU can build: one switch, two root ports, ports
# without ACS, two sockets.
# shellcheck shell=dash disable=SC2154,SC2086

machine() {
    # Two sockets, and a host bridge for each beside the board's own.
    add -smp 2,sockets=2,cores=1 -object memory-backend-ram,id=ram0,size=512M -object memory-backend-ram,id=ram1,size=512M \
        -numa node,nodeid=0,cpus=0,memdev=ram0 -numa node,nodeid=1,cpus=1,memdev=ram1 \
        -device pxb-pcie,id=bridge0,bus=pcie.0,bus_nr=64,numa_node=0 -device pxb-pcie,id=bridge1,bus=pcie.0,bus_nr=128,numa_node=1
    # Under two root ports, as always here.
    disk ssd 16M
    controller
    namespace 1 ssd
    bar 1M
    # Under one switch, which has no ACS; the root port above it has.
    add -device pcie-root-port,id=above,bus=pcie.0,chassis=3,addr=10.0 -device x3130-upstream,id=up,bus=above \
        -device xio3130-downstream,id=down1,bus=up,chassis=4,slot=1 -device xio3130-downstream,id=down2,bus=up,chassis=5,slot=2
    pair switched down1 down2
    add -device pcie-root-port,id=plain1,bus=pcie.0,chassis=6,addr=11.0,disable-acs=on -device pcie-root-port,id=plain2,bus=pcie.0,chassis=7,addr=12.0,disable-acs=on
    pair plain plain1 plain2
    add -device pcie-root-port,id=socket0,bus=bridge0,chassis=8 -device pcie-root-port,id=socket1,bus=bridge1,chassis=9
    pair apart socket0 socket1
    # A subsystem, whose namespaces the kernel shows apart from the controllers that reach them
    # (multipath).
    disk shared 16M
    add -device pcie-root-port,id=several,bus=pcie.0,chassis=10,addr=13.0 -device nvme-subsys,id=subsystem,nqn=subsystem \
        -device nvme,id=shared,serial=shared,bus=several,subsys=subsystem -device nvme-ns,drive=shared,nsid=1,bus=shared
}

# pair NAME BUS BUS: an SSD, and a device whose BAR stands in for a GPU's.
pair() {
    disk "$1" 16M
    add -device "nvme,id=$1,serial=$1,bus=$2" -device "nvme-ns,drive=$1,bus=$1,nsid=1" \
        -object "memory-backend-ram,id=$1-bar,size=1M" -device "ivshmem-plain,memdev=$1-bar,bus=$3"
}

guest() {
    check "all SSDs are listed" says 5 '^ssd  .*driver nvme' doctor 4 -v
    check "an SSD that the kernel drives" says 1 "gpunvme-vfio bind $SSD" doctor 4 "$(namespace_below "$SSD")" --peer "$GPU"
    check "two root ports" says 1 '^path *same host bridge' doctor 4 "$SSD" --peer "$GPU"
    check "which have ACS" says 2 'root port): SourceValidation RequestRedirect CompletionRedirect UpstreamForwarding' doctor 4 "$SSD" --peer "$GPU"
    check "one switch" says 1 '^path *same switch' doctor 4 "$(ssd switched)" --peer "$(bar_below pci0000:00/0000:00:10.0)"
    check "which has no ACS" says 2 'switch, downstream): none' doctor 4 "$(ssd switched)" --peer "$(bar_below pci0000:00/0000:00:10.0)"
    check "ports without ACS" says 2 'root port): none' doctor 4 "$(ssd plain)" --peer "$(bar_below pci0000:00/0000:00:12.0)"
    check "and that it matters" says 1 '^doubt *acs-absent' doctor 4 "$(ssd plain)" --peer "$(bar_below pci0000:00/0000:00:12.0)"
    check "two sockets" says 1 '^path *across sockets, NUMA nodes 0 and 1' doctor 4 "$(ssd apart)" --peer "$(bar_below pci0000:80)"
    mkfs.gpunvme --quiet "$(shared)"
    mounted "$(shared)" /mnt
    check "a namespace under multipath" says 1 "^ssd *$(ssd shared)  .*driver nvme" doctor 4 "$(shared)" --peer "$GPU"
    check "is in use" says 1 "^ *$(shared), .* mounted on /mnt" doctor 4 "$(ssd shared)" --peer "$GPU"
    check "and is not bound" refused 1 "$(shared) is mounted on /mnt" vfio bind "$(ssd shared)"
    unmounted /mnt
    check "what the machine has" says 1 '^vfio *vfio-pci is loaded, /dev/vfio/vfio is type1' doctor 4 -v

    mkfs.gpunvme --quiet "$(namespace_below "$SSD")"
    mounted "$(namespace_below "$SSD")" /mnt
    check "an SSD in use" says 2 '/mnt' doctor 4 "$SSD" --peer "$GPU"
    unmounted /mnt

    vfio bind "$SSD"
    check "an SSD bound to vfio-pci" says 1 '^route *p2p' doctor 0 "vfio:$SSD" --peer "$GPU"
    check "JSON" says 3 '"route": "p2p"' doctor 0 --json "$SSD" --peer "$GPU"
    mkfs.gpunvme --quiet --force "vfio:$SSD"
    mounted "vfio:$SSD" /mnt
    check "an SSD mounted by its address" says 1 "mounted on /mnt as vfio:$SSD" doctor 0 "$SSD" --peer "$GPU"
    check "which is not given back meanwhile" refused 1 "is mounted on /mnt" vfio unbind "$SSD"
    unmounted /mnt
    mkdir -p /etc
    echo 'alice:x:1000:1000::/:/bin/sh' >>/etc/passwd
    check "a user without the group's node" says 1 'no-access' as_alice gpunvme doctor "$SSD" --peer "$GPU"
    check "what a user does not see" says 2 'root port): not readable' as_alice gpunvme doctor "$SSD" --peer "$GPU"
    vfio bind --user alice "$SSD"
    check "a user with it" says 1 '^route *p2p' as_alice gpunvme doctor "$SSD" --peer "$GPU"
    check "a device for which there is none" refused 1 'no PCI device' gpunvme doctor 0000:0f:00.0
}

# The SSD of a pair, and the stand-in below a place in sysfs.
ssd() { cat "$(grep -l "^$1 *$" /sys/class/nvme/*/serial | sed 's|/serial$|/address|')"; }
bar_below() { find "/sys/devices/$1" -name device -type f -exec grep -l 0x1110 {} + | sed 's|.*/\([^/]*\)/device$|\1|'; }

# The namespace of an SSD: the kernel numbers them as their controllers become ready.
namespace_below() { find /sys/devices -path "*/$1/*" -name 'nvme*n1' -type d | sed 's|.*/|/dev/|'; }

# The namespace of the subsystem.
shared() { find /sys/devices/virtual/nvme-subsystem -name 'nvme*n1' -type d | sed 's|.*/|/dev/|'; }

# doctor CODE ARGUMENTS...: with that exit status.
doctor() {
    local expected=$1 code=0
    shift
    gpunvme doctor "$@" || code=$?
    [ $code = "$expected" ] || echo "exit status $code"
}
as_alice() { su -s /bin/sh -c "$*" alice; }

# says TIMES PATTERN COMMAND...: the pattern is in so many lines of what the command says, and
# nothing went wrong.
says() {
    local times=$1 pattern=$2
    shift 2
    "$@" >/tmp/said 2>&1 || true
    cat /tmp/said
    [ "$(grep -c -e "$pattern" /tmp/said)" = "$times" ] && ! grep '^exit status' /tmp/said
}
