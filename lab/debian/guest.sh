# What the Debian guest does at each of its boots; run by lab.service. /lab/boot counts them.
# shellcheck shell=dash disable=SC2034,SC1091
set -u
results=/lab/results output=/tmp/output
. /lab/scripts/check.sh
cd /lab/packages || exit

# Root needs no sudo, and this machine has none.
sudo() { "$@"; }

# The commands of docs/guide/install.md. A person is slower than udev, a script is not.
command_line() { eval "$1" && udevadm settle; }

is_mounted() { grep -Eq " $1 fuse(blk)?.gpunvme " /proc/mounts; }
mounted_in_time() { eventually 600 is_mounted "$1"; }
# The process that serves a mount.
daemon() {
    for process in /proc/[0-9]*; do
        if tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q "^[^ ]*mount.gpunvme [^ ]* $1 "; then basename "$process"; fi
    done
}
property() { udevadm info --query=property --property="$2" --value "$1"; }
# What is mounted on /data. The kernel numbers SSDs as it finds them, not at each boot alike.
ssd() { readlink -f "$(awk '$2 == "/data" { print $1 }' /proc/mounts)"; }
# The controller of the other SSD.
other() {
    for node in /sys/block/nvme*; do
        if [ "/dev/${node##*/}" != "$(ssd)" ]; then basename "$(readlink -f "$node/device/device")"; fi
    done
}

known_to_udev() {
    device=$(ssd)
    [ "$(property "$device" ID_FS_TYPE)" = gpunvme ]
    [ "$(property "$device" ID_FS_LABEL)" = data ]
    uuid=$(property "$device" ID_FS_UUID)
    [ "$(readlink -f "/dev/disk/by-uuid/$uuid")" = "$device" ]
    [ "$(readlink -f /dev/disk/by-label/data)" = "$device" ]
}
known_to_lsblk() { lsblk -f "$(ssd)" | grep -E '^nvme[01]n1 +gpunvme .* data +[0-9a-f-]{36} .* /data$'; }
nothing_failed() {
    systemctl --failed --no-legend --plain | grep -v '^lab.service' >/tmp/failed-units || true
    cat /tmp/failed-units
    while read -r unit _; do journalctl --no-pager -b -u "$unit"; done </tmp/failed-units
    [ ! -s /tmp/failed-units ]
}

# A program that reads and writes the volume as long as /tmp/go is there, and says what failed.
application() {
    while [ -e /tmp/go ]; do
        { dd if=/dev/urandom of=/data/written bs=64k count=4 conv=fsync && cmp /data/kept /lab/scripts/guest.sh; } >>/tmp/application 2>&1 ||
            echo failed >>/tmp/application-failed
    done
}

upgraded_while_mounted() {
    touch /tmp/go
    application &
    before=$(daemon /data)
    apt-get -q -y install /lab/next/*.deb
    dpkg-query -W gpunvme | grep -q -- '-2$'
    sleep 3
    rm /tmp/go
    wait $!
    [ -s /tmp/application ] && [ ! -e /tmp/application-failed ]
    # The mount is still served by the program that it began with.
    [ "$(daemon /data)" = "$before" ]
    readlink "/proc/$before/exe" | grep -q 'mount.gpunvme (deleted)$'
}
daemon_replaced() {
    began=$(date +%s%N)
    systemctl restart data.mount
    echo "restarting data.mount took $((($(date +%s%N) - began) / 1000000)) ms" >>/lab/measured
    is_mounted /data
    [ "$(readlink "/proc/$(daemon /data)/exe")" = /usr/sbin/mount.gpunvme ]
    cmp /data/kept /lab/scripts/guest.sh
}
refused_while_open() {
    exec 7</data/kept
    ! umount /data
    exec 7<&-
    is_mounted /data
}

own_driver_prepared() {
    address=$(other)
    gpunvme-vfio bind "$address"
    mkfs.gpunvme -L own "vfio:$address"
    mkdir /own
    echo "vfio:$address /own gpunvme x-systemd.requires=gpunvme-vfio@$address.service,nofail 0 0" >>/etc/fstab
    gpunvme-vfio unbind "$address"
}
own_driver_mounted() {
    address=$(cat /lab/other)
    mounted_in_time /own
    systemctl is-active "gpunvme-vfio@$address.service"
    grep -q "^vfio:$address /own " /proc/mounts
    echo x >/own/file
    sync /own/file
}

checked_at_boot() {
    systemctl is-active 'systemd-fsck@dev-disk-by\x2dlabel-data.service'
    journalctl --no-pager -b -t systemd-fsck | grep ': clean, '
}

removed_while_mounted() {
    apt-get -q -y remove gpunvme
    is_mounted /data
    cmp /data/kept /lab/scripts/guest.sh
    umount /data
    umount /own
    [ ! -e /usr/sbin/mount.gpunvme ]
}
nothing_is_left() {
    apt-get -q -y purge gpunvme libgpunvme0 libgpunvme-dev
    find / -xdev -name '*gpunvme*' ! -path '/var/log/*' ! -path '/proc/*' ! -path '/lab/*' ! -path '/var/lib/systemd/*' >/tmp/left
    cat /tmp/left
    [ ! -s /tmp/left ]
}

boot=$(($(cat /lab/boot 2>/dev/null || echo 0) + 1))
echo $boot >/lab/boot
case $boot in
    1)
        while read -r line; do check "$line" command_line "$line"; done </lab/commands
        check "it is mounted" is_mounted /data
        check "udev's database has it" known_to_udev
        check "lsblk -f shows it" known_to_lsblk
        check "a file" cp /lab/scripts/guest.sh /data/kept
        check "a program has it open: no unmounting" refused_while_open
        check "nothing failed" nothing_failed ;;
    2)
        check "mounted after a reboot" mounted_in_time /data
        check "the file is there" cmp /data/kept /lab/scripts/guest.sh
        check "udev's database has it after a reboot" known_to_udev
        check "nothing failed at the boot" nothing_failed
        check "upgrading under a program that works" upgraded_while_mounted
        check "a restart of the mount takes the new daemon" daemon_replaced
        other >/lab/other
        check "a volume of our own driver" own_driver_prepared
        check "fstab asks for a check" sed -i 's|^LABEL=data \(.*\) 0$|/dev/disk/by-label/data \1 2|' /etc/fstab ;;
    3)
        check "mounted after another reboot" mounted_in_time /data
        check "it was checked before" checked_at_boot
        check "its controller was bound, and it is mounted" own_driver_mounted
        check "nothing failed at that boot" nothing_failed
        check "removing under a mount" removed_while_mounted
        check "purging leaves nothing" nothing_is_left ;;
esac
journalctl --no-pager -b >"/lab/journal-$boot"
systemd-analyze blame >"/lab/blame-$boot" 2>&1
if [ $boot -lt 3 ]; then systemctl reboot; else
    echo complete >>"$results"
    systemctl poweroff
fi
