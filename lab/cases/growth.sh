# A volume on two controllers of our own driver is given two more while it is used, and moves data
# between all of them and one BAR.
# shellcheck shell=dash disable=SC2154,SC2086,SC2034,SC2046

machine() {
    disk ssd 32M
    controller
    namespace 1 ssd
    bar 64M
    for number in 2 3 4; do
        disk "ssd$number" 32M
        add -device "pcie-root-port,id=member$number,chassis=$((number + 8)),slot=$((number + 8))" \
            -device "nvme,id=nvme$number,serial=lab$number,bus=member$number" \
            -device "nvme-ns,drive=ssd$number,bus=nvme$number,nsid=1"
    done
}

guest() {
    # The addresses of the controllers of this class, in the order of their buses.
    members=$(grep -l '^0x010802' /sys/bus/pci/devices/*/class | cut -d / -f 6 | sort)
    check "there are four controllers" [ "$(echo $members | wc -w)" = 4 ]
    for member in $members; do check "binding $member" vfio bind $member; done
    set -- $members
    check "formatting two" mkfs.gpunvme --quiet vfio:$1 vfio:$2
    check "mounting" mounted vfio:$1+vfio:$2 /mnt
    head -c 36000007 /dev/urandom >/lab/random.bin
    cp /lab/random.bin /mnt/random.bin
    # Memory that is mapped for the two is mapped for all then.
    # They begin while there are two.
    { device-memory /mnt/storm storm --rounds 100 $GPU && touch /tmp/well; } >/tmp/storm 2>&1 &
    check "transfers are in flight" eventually 30 test -s /mnt/storm
    check "two more" says '"capacity"' gpunvme --json grow /mnt vfio:$3 vfio:$4
    check "it has four devices" says '"devices": 4' gpunvme --json info /mnt
    check "in two sets" says '"sets": 2' gpunvme --json info /mnt
    check "p2p is possible on all of them" says '"mount_route": "p2p"' gpunvme --json info /mnt
    check "more than there was room for" cp /lab/random.bin /mnt/second.bin
    sync
    check "it lies on the new ones" on_new
    check "a file of theirs to the BAR" to_bar
    check "a file from the BAR" gpunvme write /mnt/back --from pci:$GPU/2:32M --length 8000007 --require p2p
    check "it is right" cmp -n 8000007 /mnt/back /lab/random.bin
    check "transfers that began before go on" eventually 60 test -e /tmp/well
    check "what was written is right" intact
    check "unmounting" unmounted /mnt
    volume=vfio:$1+vfio:$2+vfio:$3+vfio:$4
    check "fsck" fsck.gpunvme -n $volume
    check "the first two alone are refused" refused 32 "members 3, 4 of the 4" mount.gpunvme vfio:$1+vfio:$2 /mnt
    check "mounting in another order" mounted vfio:$4+vfio:$2+vfio:$1+vfio:$3 /mnt
    check "it is the same" intact
}

on_new() {
    gpunvme --json map /mnt/second.bin >/tmp/map
    for number in 2 3; do grep -q "\"device\": $number" /tmp/map; done
}

field() { sed -n "s/^ *\"$1\": \"\?\([^\",]*\)\"\?,\?$/\1/p" "$2" | head -n 1; }

to_bar() {
    head -c 8000007 /lab/random.bin >/mnt/part
    sync /mnt/part
    gpunvme --json read /mnt/part --to pci:$GPU/2:32M --require p2p --checksum | tee /tmp/report
    [ "$(field route /tmp/report)" = p2p ]
    [ "$(field sha256 /tmp/report)" = "$(sha256sum /mnt/part | cut -d ' ' -f 1)" ]
}

intact() {
    cmp /mnt/random.bin /lab/random.bin
    cmp /mnt/second.bin /lab/random.bin
}
