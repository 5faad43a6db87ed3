# scripts/vfio takes a controller from the kernel and gives it back, and refuses what it must.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 64M
    controller
    namespace 1 ssd
    bar 1M
    # Two functions of one slot: they share an IOMMU group.
    add -device pcie-root-port,id=port3,chassis=3,slot=3
    add -device nvme,id=twin0,serial=twin0,bus=port3,addr=0.0,multifunction=on -device nvme,id=twin1,serial=twin1,bus=port3,addr=0.1
}

guest() {
    node=$(node)
    mkfs.gpunvme --quiet "$node"
    check "mounting" mounted "$node" /mnt
    check "refused while mounted" refused 1 "$node is .*/mnt" vfio bind $SSD
    check "still the kernel's" driven_by nvme $SSD
    check "unmounting" unmounted /mnt
    # shellcheck disable=SC2217 # it only holds it open
    sleep 60 <"$node" &
    sleeper=$!
    check "refused while open" refused 1 "is open in process $sleeper" vfio bind $SSD
    kill $sleeper
    check "bound by the name of a namespace" eventually 5 vfio bind "$node"
    check "vfio-pci has it" driven_by vfio-pci $SSD
    check "bound again, which changes nothing" vfio bind vfio:$SSD
    check "status says so" says "$SSD .*driver vfio-pci" vfio status
    check "given back" vfio unbind $SSD
    check "the kernel's again" driven_by nvme $SSD
    check "its namespace is there again" eventually 60 has_node
    check "no NVMe controller" refused 1 "no NVMe controller" vfio bind $GPU
    check "a bridge" refused 1 "is a bridge" vfio bind --force 0000:00:03.0
    check "half a group" refused 1 "shares IOMMU group" vfio bind 0000:03:00.0
    check "a whole group" vfio bind 0000:03:00.0 0000:03:00.1
    check "owned by a user" bound_for_user
}

driven_by() { [ "$(basename "$(readlink "/sys/bus/pci/devices/$2/driver")")" = "$1" ]; }

bound_for_user() {
    vfio bind --user 1000 $SSD
    [ "$(stat -c %u "/dev/vfio/$(basename "$(readlink /sys/bus/pci/devices/$SSD/iommu_group)")")" = 1000 ]
}
