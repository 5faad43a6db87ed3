# Files go between the SSD and GPU memory by the library: CUDA's part is played by the software
# driver, whose memory lies in two BARs. The host looks at one of them.
# shellcheck shell=dash disable=SC2154,SC2086,SC2034

machine() {
    disk ssd 512M
    controller
    namespace 1 ssd
    bar 64M
    add -device pcie-root-port,id=port3,chassis=3,slot=3
    bar 64M other-bar port3
}

guest() {
    export LD_LIBRARY_PATH=/software-cuda
    export SOFTWARE_CUDA=bar=/sys/bus/pci/devices/$GPU/resource2,bar=/sys/bus/pci/devices/0000:03:00.0/resource2_wc
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme vfio:$SSD
    check "mounting" mounted vfio:$SSD /mnt
    head -c 5000007 /dev/urandom >/lab/random.bin
    cp /lab/random.bin /mnt/random.bin
    check "a file to GPU memory" to_gpu
    check "from GPU memory to a file" from_gpu
    check "random pieces, both ways" gpu-memory /mnt/storm storm
    check "more memory than may be registered, and memory freed" gpu-memory /mnt/churn churn
    check "a copy's route may be demanded" bounced
    check "GPU memory that CUDA does not export" refused 1 "does not export" no_export gpunvme read /mnt/random.bin --to gpu:0 --require p2p
    check "and elsewhere it takes the other route" says '"route": "bounce"' no_export gpunvme --json read /mnt/random.bin --to gpu:0
    check "what doctor proves" proved
    check "what uses cost" gpu-memory /mnt/random.bin measure
    check "nothing stays registered" says '"buffers": 0' gpunvme --json stats /mnt
    check "the file for the host to look at" gpu-memory /mnt/random.bin read
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n vfio:$SSD
}

field() { sed -n "s/^ *\"$1\": \"\?\([^\",]*\)\"\?,\?$/\1/p" "$2" | head -n 1; }

to_gpu() {
    gpunvme --json read /mnt/random.bin --to gpu:0 --require p2p --checksum | tee /tmp/report
    [ "$(field p2p /tmp/report)" = $((5000007 / 512 * 512)) ]
    [ "$(field edge /tmp/report)" = $((5000007 % 512)) ]
    [ "$(field sha256 /tmp/report)" = "$(sha256sum /lab/random.bin | cut -d ' ' -f 1)" ]
}

from_gpu() {
    gpunvme --json write /mnt/copy.bin --from gpu:0 --input /lab/random.bin --require p2p | tee /tmp/report
    [ "$(field route /tmp/report)" = p2p ]
    cmp /mnt/copy.bin /lab/random.bin
}

bounced() {
    gpunvme --json read /mnt/random.bin --to gpu:0 --require bounce --checksum | tee /tmp/report
    [ "$(field route /tmp/report)" = bounce ]
    [ "$(field sha256 /tmp/report)" = "$(sha256sum /lab/random.bin | cut -d ' ' -f 1)" ]
}

no_export() { SOFTWARE_CUDA=$SOFTWARE_CUDA,dma-buf=0 "$@"; }

proved() {
    gpunvme --json doctor --gpu 0 /mnt | tee /tmp/report
    [ "$(field route /tmp/report)" = p2p ]
}

verify() {
    check "the BAR holds the file, outside" cmp -n 5000007 "$run/share/random.bin" "$run/bar"
    check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"
}
