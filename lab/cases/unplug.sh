# The controller is unplugged under a mounted volume.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 128M
    controller
    namespace 1 ssd
}

guest() {
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme --quiet vfio:$SSD
    check "mounting" mounted vfio:$SSD /mnt
    cp /bin/busybox /mnt/file
    sync /mnt/file
    (while gpunvme read /mnt/file >/dev/null 2>&1; do :; done) &
    ask unplug
    check "reading ends with an error" eventually 60 gone $!
    check "that the device is gone" refused 1 "no such device" timeout 20 gpunvme read /mnt/file
    check "which is EIO for read(2)" refused 1 "input/output error" timeout 20 dd if=/mnt/file of=/dev/null iflag=direct
    check "the log says why" grep -i "asks for the device back" /lab/log
    umount /mnt
    check "the daemon ends" eventually 60 gone "$(daemon /mnt)"
    check "the controller is gone" eventually 60 test ! -e /sys/bus/pci/devices/$SSD
    check "what is not there cannot be mounted" refused 32 "$SSD" mount.gpunvme vfio:$SSD /mnt
}

host() { answer unplug qmp '{"execute": "device_del", "arguments": {"id": "nvme0"}}'; }

verify() { check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"; }
