# gpunvme nvme on a controller behind VFIO: what it says, and what it refuses to destroy.
# shellcheck shell=dash disable=SC2154,SC2086,SC2034

machine() {
    disk ssd 128M
    disk other 64M
    controller
    namespace 1 ssd
    namespace 2 other
}

guest() {
    check "identify, of the kernel's" refused 1 "driven by the kernel" gpunvme nvme "$(node)" identify
    check "binding" vfio bind $SSD
    check "regs before it was brought up" says "^0x001c  CSTS .*  no shutdown" gpunvme nvme vfio:$SSD regs
    check "a volume" mkfs.gpunvme --quiet vfio:$SSD
    check "identify" identified
    check "smart" says "^temperature  *[0-9-]* °C" gpunvme nvme vfio:$SSD smart
    check "smart for programs" says '"temperature_celsius": [0-9]' gpunvme --json nvme vfio:$SSD smart
    check "errors" says "no errors" gpunvme nvme vfio:$SSD errors
    check "rescan" says "^ns=2  *64.0 MiB" gpunvme nvme vfio:$SSD rescan
    check "reset" says "reset: done" gpunvme nvme vfio:$SSD reset
    check "a reset loses nothing" fsck.gpunvme -n vfio:$SSD
    check "no subsystem reset" refused 1 "has no subsystem reset" gpunvme nvme vfio:$SSD subsystem-reset --yes
    check "a volume is not formatted" refused 1 "carries a gpunvme volume" gpunvme nvme vfio:$SSD format --yes
    check "nothing is formatted unasked" refused 1 "Give --yes" gpunvme nvme vfio:$SSD format --force
    check "the volume is still there" fsck.gpunvme -n vfio:$SSD
    check "no such namespace" refused 1 "no namespace 7" gpunvme nvme vfio:$SSD format --force --yes --namespace 7
    check "no such blocks" refused 1 "blocks of 1024 bytes" gpunvme nvme vfio:$SSD format --force --yes --block-size 1024
    check "format" says "^ns=1  *128.0 MiB, blocks of 4096 bytes" gpunvme nvme vfio:$SSD format --force --yes --block-size 4096
    check "the volume is gone" refused 8 "no gpunvme" fsck.gpunvme -n vfio:$SSD
    check "an empty namespace needs no force" gpunvme nvme vfio:$SSD format --yes --namespace 2 --erase user-data
    check "a volume on blocks of 4096" mkfs.gpunvme --quiet vfio:$SSD
    check "mounting" mounted vfio:$SSD /mnt
    check "busy while mounted" refused 1 "in use" gpunvme nvme vfio:$SSD smart
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n vfio:$SSD
}

identified() {
    gpunvme nvme vfio:$SSD identify | tee /tmp/said
    grep -q "^model  *QEMU NVMe Ctrl" /tmp/said
    grep -q "^serial  *lab" /tmp/said
    grep -q "^has  *.*volatile write cache.*format" /tmp/said
    grep -q "^ns=1  *128.0 MiB, blocks of 512 bytes; can have .*4096" /tmp/said
}
