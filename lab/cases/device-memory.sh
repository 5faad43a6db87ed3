# Files go between the SSD and a PCI BAR, by name and both ways, and the host looks at that BAR.
# shellcheck shell=dash disable=SC2154,SC2086,SC2034

machine() {
    disk ssd 512M
    controller
    namespace 1 ssd
    bar 64M
}

guest() {
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme vfio:$SSD
    check "mounting" mounted vfio:$SSD /mnt
    check "the mount says that p2p is possible" says '"mount_route": "p2p"' gpunvme --json info /mnt
    check "copying files in" tree_copied /mnt
    head -c 5000007 /dev/urandom >/lab/random.bin
    cp /lab/random.bin /mnt/random.bin
    check "a file to the BAR" to_bar /mnt/random.bin 1M
    check "a part of a file to the BAR" part_to_bar
    ask "pattern"
    check "from the BAR to a file" from_bar
    check "a file that ends nowhere" aligned_write
    check "random pieces, both ways" device-memory /mnt/storm storm --rounds 300 $GPU
    check "random pieces, combining writes" wc_storm
    check "what was written is durable and right" intact
    check "host memory goes through the IOMMU too" host_route
    check "only p2p may be demanded of a BAR" refused 1 "route that was required" gpunvme read /mnt/random.bin --to pci:$GPU/2 --require host
    check "a file that does not fit" refused 1 "there is room for" gpunvme read /mnt/random.bin --to pci:$GPU/2:62M
    check "a dma-buf of host memory" says "refused map-dma-refused" device-memory /mnt/x udmabuf
    check "a BAR registered by a user" says "refused not-a-buffer" device-memory /mnt/x register --user 1000 $GPU
    check "a BAR registered by root" says "p2p none" device-memory /mnt/x register $GPU
    check "a client killed in mid-transfer" killed
    check "nothing is written to its memory any more" ask "quiet"
    check "unmounting waits for the daemon" unmounted_at_once
    check "fsck" fsck.gpunvme -n vfio:$SSD
    check "giving it back" vfio unbind $SSD
    check "the kernel's driver has it" eventually 10 has_node
    check "mounting on the kernel's driver" mounted "$(node)" /mnt
    check "the kernel's driver reads what ours wrote" intact
    check "there p2p is refused" refused 1 "bound to vfio-pci" gpunvme read /mnt/random.bin --to pci:$GPU/2
    check "unmounting again" unmounted /mnt
}

field() { sed -n "s/^ *\"$1\": \"\?\([^\",]*\)\"\?,\?$/\1/p" "$2" | head -n 1; }

# to_bar FILE OFFSET: all of it but what is less than a block goes by p2p.
to_bar() {
    gpunvme --json read "$1" --to "pci:$GPU/2:$2" --require p2p --checksum | tee /tmp/report
    size=$(stat -c %s "$1")
    [ "$(field route /tmp/report)" = p2p ]
    [ "$(field bytes /tmp/report)" = "$size" ]
    [ "$(field p2p /tmp/report)" = $((size / 512 * 512)) ]
    [ "$(field edge /tmp/report)" = $((size % 512)) ]
    [ "$(field host /tmp/report)" = 0 ]
    [ "$(field sha256 /tmp/report)" = "$(sha256sum "$1" | cut -d ' ' -f 1)" ]
}

# Neither its beginning nor its end is on a block, and it lies in the BAR as in the file.
part_to_bar() {
    gpunvme --json read /mnt/random.bin --to pci:$GPU/2_wc:8388619 --offset 1000011 --length 2000000 --require p2p | tee /tmp/report
    [ "$(field bytes /tmp/report)" = 2000000 ]
    [ "$(field host /tmp/report)" = 0 ]
}

from_bar() {
    gpunvme --json write /mnt/pattern --from pci:$GPU/2:32M --length 8000001 --require p2p --checksum | tee /tmp/report
    [ "$(field p2p /tmp/report)" = $((8000001 / 4096 * 4096)) ]
    [ "$(field edge /tmp/report)" = $((8000001 % 4096)) ]
    cmp /mnt/pattern /lab/pattern
    [ "$(field sha256 /tmp/report)" = "$(sha256sum /lab/pattern | cut -d ' ' -f 1)" ]
}

# Whole blocks: the CPU may copy nothing.
aligned_write() {
    gpunvme write /mnt/aligned --from pci:$GPU/2:32M --length 4M --require p2p --require direct
    head -c 4194304 /lab/pattern | cmp /mnt/aligned
    gpunvme read /mnt/aligned --to pci:$GPU/2:48M --require p2p --require direct
}

wc_storm() { device-memory /mnt/storm2 storm --rounds 100 --seed 2 $GPU 2_wc; }

host_route() {
    gpunvme --json read /mnt/aligned --require host --require direct --checksum | tee /tmp/report
    [ "$(field host /tmp/report)" = 4194304 ]
    [ "$(field sha256 /tmp/report)" = "$(head -c 4194304 /lab/pattern | sha256sum | cut -d ' ' -f 1)" ]
}

intact() {
    tree_intact /mnt
    cmp /mnt/random.bin /lab/random.bin
    cmp /mnt/pattern /lab/pattern
}

# As umount(8) calls it where it is installed.
unmounted_at_once() {
    ln -s /programs/mount.gpunvme /tmp/umount.fuse.gpunvme
    /tmp/umount.fuse.gpunvme /mnt
    gpunvme nvme vfio:$SSD regs
}

killed() {
    device-memory /mnt/pattern loop $GPU &
    client=$!
    eventually 10 has_moved 100000000
    kill -KILL $client
    eventually 10 no_buffers
}
no_buffers() { gpunvme --json stats /mnt | grep -q '"buffers": 0'; }
has_moved() {
    gpunvme --json stats /mnt >/tmp/stats
    [ "$(field p2p /tmp/stats)" -gt "$1" ]
}

host() {
    answer pattern make_pattern
    answer quiet stays_quiet
}
make_pattern() {
    head -c 8000001 /dev/urandom >"$run/share/pattern"
    dd if="$run/share/pattern" of="$run/bar" bs=1M seek=32 conv=notrunc status=none
}
stays_quiet() {
    head -c 8000001 /dev/urandom >"$run/quiet"
    dd if="$run/quiet" of="$run/bar" bs=1M conv=notrunc status=none
    sleep 1
    cmp -n 8000001 "$run/quiet" "$run/bar" || touch "$run/disturbed"
}

verify() {
    check "the BAR holds the part of the file, outside" \
        cmp -n 2000000 "$run/share/random.bin" "$run/bar" 1000011 8388619
    check "the BAR holds what came back from the file, outside" cmp -n 4194304 "$run/share/pattern" "$run/bar" 0 50331648
    check "the BAR's memory was left alone when its user had been killed" test ! -e "$run/disturbed"
    check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"
}
