# A volume on the kernel's own nvme driver: the same guest, without our driver.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 512M
    controller
    namespace 1 ssd
}

guest() {
    check "formatting" mkfs.gpunvme "$(node)"
    check "mounting" mounted "$(node)" /mnt
    check "copying files in" tree_copied /mnt
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n "$(node)"
    check "mounting again" mounted "$(node)" /mnt
    check "comparing" tree_intact /mnt
    check "unmounting again" unmounted /mnt
}

verify() {
    check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"
}
