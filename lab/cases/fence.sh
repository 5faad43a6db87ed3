# Memory that was given back is out of the controller's reach: an address that a READ went to works
# no more after UNREGISTER. The IOMMU's own word for it is the witness, since the emulated
# controller hardly notices.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 128M
    controller
    namespace 1 ssd
    bar 16M
    add -trace pci_nvme_map_addr
    # The guest pokes at registers that vfio-pci has.
    boot=iomem=relaxed
    faults=some
}

guest() {
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme --quiet vfio:$SSD
    check "mounting" mounted vfio:$SSD,timeout=1 /mnt
    cat /bin/busybox /bin/busybox >/tmp/file
    cp /tmp/file /mnt/file
    sync /mnt/file
    ask mark
    check "READ into the BAR" gpunvme read /mnt/file --to pci:$GPU/2 --require p2p
    ask address
    ask quiet
    check "the host knows the address" test -s /lab/address
    registers=$(awk 'NR == 1 { print $1 }' /sys/bus/pci/devices/$SSD/resource)
    check "the controller is told to fetch commands from there" fetch "$(cat /lab/address)"
    check "the driver gets it back to work" eventually 60 gpunvme read /mnt/file --output /tmp/read
    check "what was read" cmp /tmp/file /tmp/read
    cp /tmp/file /lab/file
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n vfio:$SSD
}

# Makes the admin submission queue lie at that address, and rings its doorbell. The fetch fails,
# which is fatal to the controller. The daemon is stopped meanwhile: where it has commands in flight
# it would reset the controller between these steps.
fetch() {
    local configuration failed=0
    kill -STOP "$(daemon /mnt)"
    configuration=$(devmem $((registers + 0x14)) 32)
    devmem $((registers + 0x14)) 32 0
    devmem $((registers + 0x28)) 32 $(($1 & 0xffffffff))
    devmem $((registers + 0x2c)) 32 $(($1 >> 32))
    devmem $((registers + 0x14)) 32 "$configuration"
    devmem $((registers + 0x1000)) 32 1
    eventually 10 is_fatal || failed=1
    kill -CONT "$(daemon /mnt)"
    [ "$failed" = 0 ]
}
is_fatal() { [ $(($(devmem $((registers + 0x1c)) 32) & 2)) = 2 ]; }

host() {
    answer mark mark
    answer address address
    answer quiet no_fault
}

mark() { wc -l <"$run/trace" >"$run/mark"; }

# Where the last of the longest transfers since then went: the BAR was read to last.
address() {
    tail -n +"$(cat "$run/mark")" "$run/trace" | awk '/pci_nvme_map_addr/ && $5 >= longest { longest = $5; address = $3 } END { print address }' >"$run/share/address"
}

no_fault() { if grep vtd_dmar_fault "$run/trace"; then return 1; fi; }

verify() {
    check "the file is in the BAR" cmp --bytes="$(stat -c %s "$run/share/file")" "$run/bar" "$run/share/file"
    check "the IOMMU refused that address, and nothing else" only_there
}

# A command is 64 bytes.
only_there() {
    local address
    address=$(cat "$run/share/address")
    grep vtd_dmar_fault "$run/trace"
    ! grep vtd_dmar_fault "$run/trace" | grep -v "addr ${address%00}[0-3][0-9a-f] write 0"
}
