# Power is cut while files are written through the kernel's nvme driver.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

SIZE=67108864

machine() {
    logged_disk ssd $SIZE
    controller
    namespace 1 ssd
}

guest() {
    check "formatting" mkfs.gpunvme --quiet "$(node)"
    check "mounting" mounted "$(node)" /mnt
    powercut write /mnt >/lab/acknowledged 2>&1
}

host() { cut_power_after 60; }

verify() {
    check "the host cut the power" power_was_cut
    check "states that power cuts leave" "$bin/powercut" judge --len $SIZE "$run/ssd.log"
    check "fsck of what the disk really holds" "$bin/fsck.gpunvme" -n "$run/ssd.img"
}
