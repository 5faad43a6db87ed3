# A machine that has an IOMMU, and a kernel that was told not to use it: what gpunvme doctor and
# scripts/vfio say.
# shellcheck shell=dash disable=SC2154

machine() {
    disk ssd 16M
    controller
    namespace 1 ssd
    bar 1M
    add -append "$PARAMETERS intel_iommu=off"
}

guest() {
    check "doctor says what turned it off" refused 4 "remove intel_iommu=off from the kernel's parameters" gpunvme doctor "$SSD" --peer "$GPU"
    check "doctor names the reason" refused 4 '"reason": "no-vfio"' gpunvme doctor --json "$SSD" --peer "$GPU"
    check "binding is refused" refused 1 "$SSD is behind no IOMMU" vfio bind "$SSD"
    check "the kernel keeps it" test -e /dev/nvme0n1
}
