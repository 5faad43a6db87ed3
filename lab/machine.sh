# The machine of the lab: QEMU, the guest's kernel and its first root. To be sourced after
# scripts/lib.sh.
# shellcheck shell=bash disable=SC2154,SC2034

KERNEL_SERIES=linux-image-6.12-amd64
# Its parameters on every machine. It does not look whether its timer ticks, which a busy host may
# let it find too late, and does without what costs an emulated processor most.
PARAMETERS="console=ttyS0 panic=-1 quiet no_timer_check mitigations=off"
# In the order in which they need each other.
MODULES=(irqbypass vfio vfio_iommu_type1 vfio-pci-core vfio-pci nvme-auth nvme-keyring nvme-core nvme netfs 9pnet 9pnet_virtio 9p)
# Those of NVMe over Fabrics, both ends, which a case loads if it needs them.
FABRICS=(nvme-fabrics nvme-tcp configfs nvmet nvmet-tcp)

# Sets $kernel to a folder with the newest kernel of the series that apt offers: vmlinuz, initrd.
# One that was fetched before serves where apt offers none.
get_kernel() {
    local cache=$1 package module fetched=$work/kernel
    package=$(apt-cache depends --important "$KERNEL_SERIES" 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }')
    if [ -z "$package" ]; then
        apt_get update >&2 || true
        package=$(apt-cache depends --important "$KERNEL_SERIES" 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }')
    fi
    kernel=$cache/${package:-none}
    if ! is_whole "$kernel" && [ -n "$package" ]; then
        say "fetching $package"
        mkdir -p "$fetched"
        if (cd "$fetched" && flock /var/lib/dpkg apt-get -qq download "$package" >/dev/null 2>&1); then
            dpkg-deb --extract "$fetched"/*.deb "$fetched"
            mkdir -p "$kernel/modules"
            for module in "${MODULES[@]}" "${FABRICS[@]}"; do
                find "$fetched/lib/modules" -name "$module.ko.xz" -exec xz -dc {} + >"$kernel/modules/$module.ko"
                [ -s "$kernel/modules/$module.ko" ] || die "$package has no module $module"
            done
            mv "$fetched"/boot/vmlinuz-* "$kernel/vmlinuz"
        fi
        rm -rf "$fetched"
    fi
    if ! is_whole "$kernel"; then
        kernel=$(find "$cache" -maxdepth 2 -name vmlinuz -printf '%T@ %h\n' 2>/dev/null | sort -n | tail -n 1 | cut -d ' ' -f 2-)
        is_whole "${kernel:-none}" || { why_not="apt offers no $KERNEL_SERIES"; return 1; }
    fi
}

# Whether a kernel is there, with all that guests load.
is_whole() {
    local module
    for module in "${MODULES[@]}" "${FABRICS[@]}"; do [ -s "$1/modules/$module.ko" ] || return 1; done
    [ -e "$1/vmlinuz" ]
}

# Makes $1, the guest's root: busybox, the modules, what guests run, and init, which finds the rest
# in the shared folder. It is not compressed: an emulated processor takes long to unpack it.
make_initrd() {
    local root=$work/root
    mkdir -p "$root"/{bin,proc,sys,dev,tmp,lab,mnt,modules}
    cp /bin/busybox "$root/bin/"
    cp lab/init "$root/init"
    cp "$kernel"/modules/*.ko "$root/modules/"
    printf '%s\n' "${MODULES[@]}" >"$root/modules/order"
    printf '%s\n' "${FABRICS[@]}" >"$root/modules/fabrics"
    put_programs "$root"
    (cd "$root" && find . | cpio --quiet -o -H newc --owner=0:0) >"$1"
    rm -r "$root"
}

# Puts into the root $1 what guests run: our programs without their debugging information, and
# blkid, which mkfs.gpunvme asks; the libraries that these load.
put_programs() {
    local program library
    mkdir "$1"/{programs,software-cuda}
    for program in mkfs.gpunvme fsck.gpunvme mount.gpunvme gpunvme device-memory gpu-memory powercut; do
        strip -o "$1/programs/$program" "$bin/$program"
    done
    cp "$(PATH=$PATH:/sbin:/usr/sbin command -v blkid)" "$1/programs/"
    strip -o "$1/software-cuda/libcuda.so" "$bin/libsoftware_cuda.so"
    ldd "$1"/programs/* | grep -o '/lib[^ ]*' | sort -u | while read -r library; do
        mkdir -p "$1${library%/*}"
        cp -L "$library" "$1$library"
    done
    cp scripts/vfio "$1/programs/"
}

# Fills the folder $1, which each machine shares with the host, with the scripts.
make_share() {
    mkdir -p "$1/scripts"
    cp lab/*.sh "$1/scripts/"
}

# --- What a case says about its machine. Each adds to QEMU's command line. ---

add() { qemu+=("$@"); }

# disk NAME SIZE: a file $run/NAME.img, the node NAME-file on it, and on that the node NAME.
disk() {
    truncate -s "$2" "$run/$1.img"
    add -blockdev "driver=file,node-name=$1-file,filename=$run/$1.img" -blockdev "driver=raw,node-name=$1,file=$1-file"
}

# logged_disk NAME SIZE: the same, with all writes and flushes logged in $run/NAME.log, in the
# format of dm-log-writes.
logged_disk() {
    truncate -s "$2" "$run/$1.img"
    truncate -s 0 "$run/$1.log"
    add -blockdev "driver=file,node-name=$1-file,filename=$run/$1.img" -blockdev "driver=file,node-name=$1-log,filename=$run/$1.log" \
        -blockdev "driver=blklogwrites,node-name=$1,file=$1-file,log=$1-log"
}

# controller [,OPTIONS]: the NVMe controller, 0000:01:00.0.
controller() { add -device "nvme,id=nvme0,serial=lab,bus=port1${1-}"; }

# namespace NUMBER DISK [,OPTIONS]
namespace() { add -device "nvme-ns,drive=$2,bus=nvme0,nsid=$1${3-}"; }

# bar SIZE [NAME PORT]: a device whose BAR 2, $run/NAME, stands in for a GPU's memory; without more
# the one at 0000:02:00.0, and $run/bar.
bar() {
    local name=${2-bar} port=${3-port2}
    add -object "memory-backend-file,id=$name,mem-path=$run/$name,size=$1,share=on" -device "ivshmem-plain,memdev=$name,bus=$port"
}

# --- The machine's life. ---

# Starts it. Sets $machine, its process.
start_machine() {
    nodes=0
    mkfifo "$run/qmp.in" "$run/qmp.out"
    timeout --kill-after=2 "$seconds" qemu-system-x86_64 -nodefaults -no-user-config -machine q35 -accel tcg,thread=multi \
        -cpu max,-monitor -m 1G -smp 2 -display none -no-reboot -kernel "$kernel/vmlinuz" -initrd "$work/initrd" \
        -pidfile "$run/pid" -append "$PARAMETERS intel_iommu=on $boot" -serial "file:$run/console" \
        -chardev "pipe,id=qmp,path=$run/qmp" -mon chardev=qmp,mode=control \
        -device intel-iommu,intremap=on,caching-mode=on,aw-bits=48 \
        -trace vtd_dmar_fault -trace 'pci_nvme_err*' -trace 'pci_nvme_ub*' -D "$run/trace" \
        -virtfs "local,path=$run/share,mount_tag=lab,security_model=none,multidevs=remap" \
        "${qemu[@]}" >"$run/qemu" 2>&1 </dev/null &
    machine=$!
    # Opened for both directions, so that neither end waits for the other to open it.
    exec {qmp_in}<>"$run/qmp.in" {qmp_out}<>"$run/qmp.out"
    qmp '{"execute": "qmp_capabilities"}'
}

# Waits for it to be turned off.
wait_machine() {
    local code=0
    wait "$machine" 2>/dev/null || code=$?
    exec {qmp_in}>&- {qmp_out}>&-
    return $code
}

# qmp COMMAND: one command to QEMU, and its answer on stdout.
qmp() {
    local line
    echo "$1" >&"$qmp_in"
    while read -r -t 20 line <&"$qmp_out"; do
        case $line in
            '{"return"'*) echo "$line"; return 0 ;;
            '{"error"'*) echo "$line" >&2; return 1 ;;
        esac
    done
    return 1
}

# put_below DISK JSON: from now on the disk lies on a node that these options describe. It gets a
# name of its own.
put_below() {
    local name=below$((nodes += 1))
    qmp "{\"execute\": \"blockdev-add\", \"arguments\": {\"node-name\": \"$name\", $2}}"
    put_on "$1" "$name"
}

# put_on DISK NODE: from now on the disk lies on that node.
put_on() {
    qmp "{\"execute\": \"blockdev-reopen\", \"arguments\": {\"options\": [{\"driver\": \"raw\", \"node-name\": \"$1\", \"file\": \"$2\"}]}}"
}

# answer NAME COMMAND...: waits until the guest asks for NAME, does it, and says so.
answer() {
    local name=$1
    shift
    eventually "$seconds" test -e "$run/share/asked-$name"
    rm "$run/share/asked-$name"
    "$@"
    touch "$run/share/done-$name"
}

# cut_power_after FILES: kills QEMU when powercut(1) in the guest has said that so many files are
# durable.
cut_power_after() {
    eventually "$seconds" acknowledged "$1" || return 1
    # Said first: the machine is gone, and is judged, as soon as it is killed.
    touch "$run/cut"
    kill -KILL "$(cat "$run/pid")"
}
acknowledged() { [ "$(grep -c '^[0-9]' "$run/share/acknowledged")" -ge "$1" ]; }
power_was_cut() { [ -e "$run/cut" ]; }
