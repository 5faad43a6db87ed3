# Clients are killed amid transfers between SSD and BAR, and then the daemon is: nothing reaches
# memory that it should not, and all goes on.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 256M
    controller
    namespace 1 ssd
    truncate -s 64M "$run/bar"
    bar 64M
}

guest() {
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme --quiet vfio:$SSD
    check "mounting" mounted vfio:$SSD /mnt
    while [ "$(stat -c %s /tmp/file 2>/dev/null || echo 0)" -lt 30000000 ]; do cat /programs/* /lib/*/* >>/tmp/file; done
    cp /tmp/file /mnt/file
    sync /mnt/file
    check "clients killed amid READ" killed_clients read --to
    check "clients killed amid WRITE" killed_clients write --from
    check "the daemon has let go of their buffers" eventually 5 no_buffers
    check "READ works" gpunvme read /mnt/file --to pci:$GPU/2 --require p2p
    check "the daemon killed amid READ" killed_daemon
    check "fsck recovers" fsck.gpunvme -n vfio:$SSD
    check "mounting again" mounted vfio:$SSD /mnt
    check "the file is whole" cmp /tmp/file /mnt/file
    check "READ works again" gpunvme read /mnt/file --to pci:$GPU/2 --require p2p
    cp /tmp/file /lab/file
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n vfio:$SSD
}

# killed_clients VERB OPTION: ten clients, each killed after a different time.
killed_clients() {
    local file=/mnt/file client time
    [ "$1" = read ] || file=/mnt/other
    for time in 0.02 0.05 0.1 0.15 0.2 0.25 0.3 0.35 0.4 0.5; do
        gpunvme "$1" $file "$2" pci:$GPU/2 >/dev/null 2>&1 &
        client=$!
        sleep $time
        kill -KILL $client || true
        wait $client || true
    done
}

no_buffers() { gpunvme stats /mnt | grep -q 'buffers  *0'; }

killed_daemon() {
    (while gpunvme read /mnt/file --to pci:$GPU/2 >/dev/null 2>&1; do :; done) &
    sleep 0.5
    kill -KILL "$(daemon /mnt)"
    eventually 10 gone "$(daemon /mnt)"
    umount -l /mnt || umount /mnt
}

verify() {
    check "the BAR holds the file" cmp --bytes="$(stat -c %s "$run/share/file")" "$run/bar" "$run/share/file"
    check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"
}
