# A volume on our own driver, by way of VFIO; then the kernel's driver reads what ours wrote, in
# the same boot, and the reverse.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 512M
    controller
    namespace 1 ssd
    bar 1M
    add -trace pci_nvme_map_sgl -trace pci_nvme_irq_msix
}

guest() {
    device=vfio:$SSD
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme $device
    check "mounting" mounted $device /mnt
    check "copying files in" tree_copied /mnt
    check "unbinding is refused while mounted" refused 1 "in use" vfio unbind $SSD
    check "a child of the daemon would not keep the controller" keeps_registers_from_children "$(daemon /mnt)"
    check "a second user is refused" refused 8 "already mounted" fsck.gpunvme -n $device
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n $device
    check "mounting again" mounted $device /mnt
    check "comparing" tree_intact /mnt
    check "unmounting again" unmounted /mnt

    check "giving it back" vfio unbind $SSD
    eventually 60 has_node
    check "fsck through the kernel's driver" fsck.gpunvme -n "$(node)"
    check "mounting through the kernel's driver" mounted "$(node)" /mnt
    check "comparing through the kernel's driver" tree_intact /mnt
    check "writing through the kernel's driver" tree_copied /mnt/kernel
    check "unmounting the kernel's driver" unmounted /mnt

    check "binding again" vfio bind $SSD
    check "mounting what the kernel wrote" mounted $device /mnt
    check "comparing what the kernel wrote" tree_intact /mnt/kernel
    check "unmounting at last" unmounted /mnt
}

# What is mapped of the controller is not mapped in a child.
keeps_registers_from_children() {
    awk '/^[0-9a-f]+-/ { bar = /vfio/ } bar && /^VmFlags/ { found = 1; kept = kept || !/ dc/ } END { exit !found || kept }' "/proc/$1/smaps"
}

verify() {
    check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"
    check "the controller was given SGLs" grep -q pci_nvme_map_sgl "$run/trace"
    check "it interrupted by MSI-X" grep -q pci_nvme_irq_msix "$run/trace"
}
