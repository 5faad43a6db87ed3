# One volume on four controllers of our own driver: peer to peer into one BAR and out of it, and
# one of the four is unplugged under the mount.
# shellcheck shell=dash disable=SC2154,SC2086,SC2034,SC2046

machine() {
    disk ssd 128M
    controller
    namespace 1 ssd
    bar 64M
    for number in 2 3 4; do
        disk "ssd$number" 128M
        add -device "pcie-root-port,id=member$number,chassis=$((number + 8)),slot=$((number + 8))" \
            -device "nvme,id=nvme$number,serial=lab$number,bus=member$number" \
            -device "nvme-ns,drive=ssd$number,bus=nvme$number,nsid=1"
    done
}

# The addresses of the controllers, in the order of their buses: ours are the four of this class.
controllers() { grep -l '^0x010802' /sys/bus/pci/devices/*/class | cut -d / -f 6 | sort; }

guest() {
    members=$(controllers)
    check "there are four controllers" [ "$(echo $members | wc -w)" = 4 ]
    for member in $members; do check "binding $member" vfio bind $member; done
    volume=$(for member in $members; do printf '+vfio:%s' $member; done | cut -c 2-)
    last=$(echo $members | cut -d ' ' -f 4)
    check "formatting" mkfs.gpunvme --quiet $(echo $volume | tr + ' ')
    check "one alone is refused" refused 32 "name all of them" mount.gpunvme vfio:$SSD /mnt
    check "mounting" mounted $volume /mnt
    check "it has four devices" says '"devices": 4' gpunvme --json info /mnt
    check "p2p is possible on all of them" says '"mount_route": "p2p"' gpunvme --json info /mnt
    check "copying files in" tree_copied /mnt
    head -c 20000007 /dev/urandom >/lab/random.bin
    cp /lab/random.bin /mnt/random.bin
    check "a file over all four lies on all four" on_all
    check "a file to the BAR" to_bar
    ask pattern
    check "from the BAR to a file" from_bar
    check "random pieces, both ways" device-memory /mnt/storm storm --rounds 100 $GPU
    check "what was written is right" intact
    check "blocks that no file has" says '"trimmed"' gpunvme --json trim /mnt
    check "and what files have is right" intact
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n $volume
    check "mounting in another order" mounted "$(echo $volume | tr + '\n' | sort -r | tr '\n' + | sed 's/+$//')" /mnt
    check "it is the same" intact

    sync /mnt/random.bin
    reading /mnt/random.bin /lab/random.bin &
    reader=$!
    ask unplug
    check "reading ends with an error" eventually 60 gone $reader
    check "and never gave anything wrong" test ! -e /tmp/wrong
    check "what a direct read gives is an error" refused 1 "" timeout 30 gpunvme read /mnt/random.bin
    check "so it is into the BAR" refused 1 "" timeout 30 gpunvme read /mnt/random.bin --to pci:$GPU/2 --require p2p
    check "whatever can be read is right" nothing_wrong
    check "a write that is to be durable fails" refused 1 "" timeout 30 dd if=/lab/random.bin of=/mnt/late bs=1M conv=fsync
    check "the log says why" grep -i "asks for the device back" /lab/log
    umount /mnt
    check "the daemon ends" eventually 60 gone "$(daemon /mnt)"
    check "three of four cannot be mounted" refused 32 "$last" timeout 60 mount.gpunvme $volume /mnt
}

field() { sed -n "s/^ *\"$1\": \"\?\([^\",]*\)\"\?,\?$/\1/p" "$2" | head -n 1; }

on_all() {
    gpunvme --json map /mnt/random.bin >/tmp/map
    for number in 0 1 2 3; do grep -q "\"device\": $number" /tmp/map; done
}

to_bar() {
    gpunvme --json read /mnt/random.bin --to pci:$GPU/2:1M --require p2p --checksum | tee /tmp/report
    [ "$(field route /tmp/report)" = p2p ]
    [ "$(field host /tmp/report)" = 0 ]
    [ "$(field sha256 /tmp/report)" = "$(sha256sum /lab/random.bin | cut -d ' ' -f 1)" ]
}

from_bar() {
    gpunvme --json write /mnt/pattern --from pci:$GPU/2:32M --length 8000001 --require p2p --checksum | tee /tmp/report
    [ "$(field p2p /tmp/report)" = $((8000001 / 4096 * 4096)) ]
    cmp /mnt/pattern /lab/pattern
}

intact() {
    tree_intact /mnt
    cmp /mnt/random.bin /lab/random.bin
    cmp /mnt/pattern /lab/pattern
}

# reading FILE COPY: reads past all caches until that fails, and notes what is not as in the copy.
reading() {
    while gpunvme read "$1" --output /tmp/read >/dev/null 2>&1; do
        cmp -s /tmp/read "$2" || touch /tmp/wrong
    done
}

# Each file of the tree is what it was, or an error.
nothing_wrong() {
    find /programs /lib -type f | head -n 40 | while read -r file; do
        if timeout 30 dd if="/mnt$file" of=/tmp/read bs=1M iflag=direct 2>/dev/null; then
            cmp /tmp/read "$file" || exit 1
        fi
    done
}

host() {
    answer pattern make_pattern
    answer unplug qmp '{"execute": "device_del", "arguments": {"id": "nvme4"}}'
}
make_pattern() {
    cp "$run/bar" "$run/bar.first"
    head -c 8000001 /dev/urandom >"$run/share/pattern"
    dd if="$run/share/pattern" of="$run/bar" bs=1M seek=32 conv=notrunc status=none
}

verify() {
    check "the BAR held the file, outside" cmp -n 20000007 "$run/share/random.bin" "$run/bar.first" 0 1048576
    check "fsck of the disks, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"
}
