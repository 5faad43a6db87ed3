//! Whole machines: what the doctor says of recorded trees, of trees written by hand, and of each
//! with one thing changed.

use super::fixture::{Expanded, expand};
use super::pci::{Acs, Kind};
use super::topology::{Forwards, Relation};
use super::*;
use gpunvme::Reason;
use serde_json::Value;

const HGX: &str = include_str!("../../../../tests/trees/hgx.tree");
const DESKTOP: &str = include_str!("../../../../tests/trees/desktop.tree");
const H200: &str = include_str!("../../../../tests/trees/h200.tree");
const QEMU: &str = include_str!("../../../../tests/trees/qemu.tree");

/// The SSD under the GPU's switch, and that GPU.
const NEAR: &str = "0000:19:00.0";
const GPU: &str = "0000:18:00.0";
/// The SSD of the other socket.
const FAR: &str = "0000:9b:00.0";

/// Changes each `from` into `to`, and insists that there is one.
fn changed(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "the tree has no {from:?}");
    text.replace(from, to)
}

/// The section of one function, changed.
fn at(text: &str, address: &str, from: &str, to: &str) -> String {
    let start = text.find(&format!("/{address}]")).unwrap();
    let end = text[start..].find("\n[").map_or(text.len(), |len| start + len);
    format!("{}{}{}", &text[..start], changed(&text[start..end], from, to), &text[end..])
}

/// A function given to vfio-pci.
fn bound(text: &str, address: &str) -> String {
    // With its driver go its disks.
    let text = &changed(text, &format!("{address}/nvme/"), &format!("{address}/gone/"));
    let text = changed(&at(text, address, "drivers/nvme\n", "drivers/vfio-pci\n"), "container = absent", "container = type1");
    format!("dev/vfio/15 =\ndev/vfio/35 =\n{text}")
}

struct Told {
    diagnosis: Diagnosis,
    text: String,
    json: Value,
}

fn told(text: &str, device: Option<&str>) -> Told {
    told_of(text, device, None)
}

fn told_of(text: &str, device: Option<&str>, peer: Option<&str>) -> Told {
    let Expanded { tree, container, .. } = &expand(text);
    let diagnosis = diagnose(tree, container.clone(), device.map(Named::new), peer).unwrap();
    let report = render::render(&diagnosis, true);
    Told { diagnosis, text: report.text, json: report.json }
}

impl Told {
    fn verdict(&self) -> &Verdict {
        self.diagnosis.verdict().unwrap()
    }

    fn path(&self) -> &Path {
        &self.diagnosis.ssds[0].pairs[0].path
    }

    fn codes(&self) -> Vec<&str> {
        self.verdict().findings.iter().map(|finding| finding.code).collect()
    }

    fn command(&self) -> &str {
        self.verdict().first().unwrap().change.as_ref().unwrap().command.as_deref().unwrap()
    }

    #[track_caller]
    fn is(&self, route: Route, reason: Reason, first: Option<&str>) {
        let verdict = self.verdict();
        assert_eq!((verdict.route, verdict.reason), (route, reason), "{}", self.text);
        assert_eq!(verdict.first().map(|finding| finding.code), first, "{}", self.text);
        assert_eq!((&self.json["route"], &self.json["reason"]), (&Value::from(route.name()), &Value::from(reason.name())));
        assert_eq!(self.json["change"]["for"].as_str(), first);
    }
}

#[test]
fn a_free_ssd_beside_a_gpu_only_wants_to_be_bound() {
    let told = told(HGX, Some(NEAR));
    told.is(Route::Bounce, Reason::NoVfio, Some("bound-to-kernel"));
    assert_eq!(told.command(), "gpunvme-vfio bind 0000:19:00.0");
    assert_eq!(told.codes(), ["bound-to-kernel"], "{}", told.text);
    assert_eq!((told.path().relation, told.path().forwards), (Relation::SameSwitch, Forwards::Known));
    assert_eq!(told.path().common.as_deref(), Some("0000:16:00.0"));
    assert_eq!(told.diagnosis.ssds[0].disks[0].name, "nvme1n1");
}

#[test]
fn bound_it_is_peer_to_peer() {
    let told = told(&bound(HGX, NEAR), Some(NEAR));
    told.is(Route::P2p, Reason::None, None);
    assert!(told.codes().is_empty(), "{}", told.text);
    assert_eq!(told.diagnosis.ssds[0].pairs.len(), 2);
    assert_eq!(told.diagnosis.ssds[0].pairs[0].gpu.address, GPU);
    assert!(told.text.contains("other gpu   0000:9a:00.0  across sockets"), "{}", told.text);
}

/// By the name of the namespace, of the controller and by address: the same device.
#[test]
fn devices_go_by_several_names() {
    for name in ["/dev/nvme1n1", "0000:19:00.0", "19:00.0", "vfio:0000:19:00.0,ns=2", "vfio:19:00.0"] {
        let told = told(HGX, Some(name));
        assert_eq!(told.diagnosis.ssds[0].function.as_ref().unwrap().address, NEAR, "{name}");
    }
    let tree = expand(HGX).tree;
    for (name, message) in [
        ("vfio:nvme1n1", "must be vfio: and a PCI address"),
        ("ff:00.0", "there is no PCI device"),
        ("/dev/nvme9n1", "No such file"),
    ] {
        let refused = device::find(&tree, name).unwrap_err();
        assert!(refused.contains(message), "{refused}");
    }
    told(HGX, Some("sim:/tmp/image")).is(Route::Bounce, Reason::NoVfio, None);
}

#[test]
fn another_namespace_is_no_partition() {
    let disk = |name: &str, uses: &[&str]| device::Disk {
        name: name.into(),
        bytes: 1 << 30,
        uses: uses.iter().map(|usage| (*usage).to_owned()).collect(),
    };
    let usage = |names: [device::Disk; 2]| super::render::usage(&names[0], &names);
    assert_eq!(usage([disk("nvme0n1", &[]), disk("nvme0n10", &["mounted on /data"])]), "not in use");
    assert_eq!(usage([disk("nvme0n1", &[]), disk("nvme0n1p2", &["mounted on /data"])]), "its partitions are in use");
    assert_eq!(usage([disk("vda", &[]), disk("vda2", &["used as swap"])]), "its partitions are in use");
    assert_eq!(usage([disk("vda", &["mounted on /"]), disk("vda2", &[])]), "mounted on /");
}

/// What the system runs from is never to be bound; a partition says it of the whole disk.
#[test]
fn the_system_disk_is_left_alone() {
    let told = told(HGX, Some("/dev/nvme0n1p2"));
    told.is(Route::Bounce, Reason::NoVfio, Some("system-disk"));
    assert!(told.text.contains("/dev/nvme0n1p1, ") && told.text.contains("mounted on /boot/efi"), "{}", told.text);
    assert!(!told.text.contains("gpunvme-vfio bind"), "{}", told.text);
    let whole = told.text.lines().find(|line| line.contains("/dev/nvme0n1,")).unwrap();
    assert!(whole.ends_with("its partitions are in use"), "{whole}");
    // Whatever name it was mounted by, as by kernels that mount the root themselves.
    let by_another_name = changed(HGX, "ext4 /dev/nvme0n1p2", "ext4 /dev/root");
    told_of(&by_another_name, Some("/dev/nvme0n1"), None).is(Route::Bounce, Reason::NoVfio, Some("system-disk"));
}

/// Also through device mapper and RAID.
#[test]
fn the_system_may_lie_on_a_volume_of_several_layers() {
    let told = told(DESKTOP, Some("/dev/nvme1n1"));
    assert!(told.codes().contains(&"system-disk"), "{}", told.text);
    assert!(told.text.contains("part of dm-0 (vg-root), which holds the root filesystem"), "{}", told.text);
    assert!(!told.text.contains("gpunvme-vfio bind"), "{}", told.text);
    // What is made of itself, as no kernel has it, ends somewhere.
    let circle = format!("{DESKTOP}\n/sys/devices/virtual/block/dm-0/holders/dm-0/ =\n");
    assert!(told_of(&circle, Some("/dev/nvme1n1"), None).codes().contains(&"system-disk"));
}

#[test]
fn a_disk_in_use_is_to_be_freed_first() {
    let mounted = changed(HGX, "23 22 259:1", "24 22 259:10 / /data rw - xfs /dev/nvme1n1 rw\\n23 22 259:1");
    let told = told(&mounted, Some(NEAR));
    told.is(Route::Bounce, Reason::NoVfio, Some("bound-to-kernel"));
    assert!(
        told.verdict().first().unwrap().change.as_ref().unwrap().text.contains("/dev/nvme1n1 is mounted on /data"),
        "{}",
        told.text
    );
}

#[test]
fn all_ssds_are_listed_and_the_best_speaks_for_the_machine() {
    let told = told(&bound(HGX, FAR), None);
    told.is(Route::P2p, Reason::None, None);
    let ssds: Vec<_> = told.json["ssds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|ssd| (ssd["address"].as_str().unwrap(), ssd["route"].as_str().unwrap()))
        .collect();
    assert_eq!(ssds, [("0000:01:00.0", "bounce"), (NEAR, "bounce"), ("0000:3a:00.0", "bounce"), (FAR, "p2p")]);
    assert_eq!(told.json["ssds"][3]["pairs"][0]["gpu"], "0000:9a:00.0");
}

#[test]
fn the_slowest_route_of_its_members_is_that_of_a_volume() {
    let both = format!("{NEAR}+vfio:{FAR}");
    let told = told(HGX, Some(&format!("vfio:{both}")));
    assert_eq!(told.json["members"], serde_json::json!([format!("vfio:{NEAR}"), format!("vfio:{FAR}")]));
    assert!(told.text.contains("volume      on 2 devices") && told.text.contains("GPU0"), "{}", told.text);
    assert_eq!(told.diagnosis.decisive().unwrap().function.as_ref().unwrap().address, FAR);
    // One of them is not enough.
    for (bound_one, other) in [(NEAR, FAR), (FAR, NEAR)] {
        let told = super::tests::told(&bound(HGX, bound_one), Some(&format!("vfio:{both}")));
        told.is(Route::Bounce, Reason::NoVfio, Some("bound-to-kernel"));
        assert_eq!(told.command(), format!("gpunvme-vfio bind {other}"));
    }
    let all = bound(&at(HGX, FAR, "drivers/nvme\n", "drivers/vfio-pci\n"), NEAR)
        .replace(&format!("{FAR}/nvme/"), &format!("{FAR}/gone/"));
    assert_eq!(super::tests::told(&all, Some(&format!("vfio:{both}"))).verdict().route, Route::P2p);
}

#[test]
fn members_are_named_as_people_and_mounts_name_them() {
    let members = |device: &str| Named::new(device).members;
    assert_eq!(members("vfio:0000:01:00.0+vfio:0000:02:00.0,admin=x"), ["vfio:0000:01:00.0", "vfio:0000:02:00.0,admin=x"]);
    assert_eq!(members("/nowhere/a+/nowhere/b+c"), ["/nowhere/a", "/nowhere/b+c"]);
    assert_eq!(members("/nowhere"), ["/nowhere"]);
}

#[test]
fn a_driver_that_keeps_its_dma_bufs_to_itself_is_the_first_thing_to_change() {
    let old = changed(&bound(HGX, NEAR), "610.43.02", "580.159.04");
    let told_old = told(&old, Some(NEAR));
    told_old.is(Route::Bounce, Reason::MmapRefused, Some("cuda-too-old"));
    assert!(told_old.text.contains("CUDA 13.0") && told_old.text.contains("branch 610"), "{}", told_old.text);
    let closed = changed(&bound(HGX, NEAR), "UNIX Open Kernel Module for x86_64", "UNIX x86_64 Kernel Module");
    told(&closed, Some(NEAR)).is(Route::Bounce, Reason::MmapRefused, Some("cuda-closed"));
}

#[test]
fn iommufds_imitation_is_named_before_and_after_it_is_loaded() {
    let loaded = changed(&bound(HGX, NEAR), "container = type1", "container = iommufd-compat");
    told(&loaded, Some(NEAR)).is(Route::Bounce, Reason::IommufdCompat, Some("iommufd-compat"));
    let built = format!("boot/config-6.8.0-51-generic = CONFIG_IOMMUFD=y\\nCONFIG_IOMMUFD_VFIO_CONTAINER=y\n{HGX}");
    told(&built, Some(NEAR)).is(Route::Bounce, Reason::IommufdCompat, Some("iommufd-compat"));
    let bare = changed(&bound(HGX, NEAR), "container = type1", "container = no-type1");
    let told = told(&bare, Some(NEAR));
    told.is(Route::Bounce, Reason::NoVfio, Some("no-type1"));
    assert_eq!(told.command(), "modprobe vfio_iommu_type1");
}

#[test]
fn a_kernel_without_vfio_is_told_from_one_that_can_load_it() {
    let none = changed(
        HGX,
        "lib/modules/6.8.0-51-generic/modules.dep = kernel/drivers/vfio/pci/vfio-pci.ko.zst: kernel/drivers/vfio/pci/vfio-pci-core.ko.zst",
        "",
    );
    // No folder of modules at all: a container's view, or a kernel without modules.
    let bare = told(&none, Some(NEAR));
    bare.is(Route::Bounce, Reason::NoVfio, Some("no-vfio-module"));
    assert!(bare.text.contains("in a container on its host"), "{}", bare.text);
    let told_lacking = told(&format!("lib/modules/6.8.0-51-generic/modules.dep = kernel/fs/xfs/xfs.ko:\n{none}"), Some(NEAR));
    told_lacking.is(Route::Bounce, Reason::NoVfio, Some("no-vfio-module"));
    assert_eq!(told_lacking.command(), "apt install linux-modules-extra-6.8.0-51-generic");
    // A kernel that knows iommufd's own devices only, or a container that was given none.
    let no_container = changed(&bound(HGX, NEAR), "container = type1", "container = absent");
    told(&no_container, Some(NEAR)).is(Route::Bounce, Reason::NoVfio, Some("no-container"));
}

/// Off by the kernel's default, off by a parameter, off in the firmware; each has its own way out.
#[test]
fn no_iommu_has_several_causes() {
    let no_groups: String = HGX.lines().filter(|line| !line.contains("iommu")).map(|line| format!("{line}\n")).collect();
    let told_near = |text: &str| told(text, Some(NEAR));
    let by_default = told_near(&no_groups);
    by_default.is(Route::Bounce, Reason::NoVfio, Some("no-iommu"));
    assert!(by_default.command().contains("intel_iommu=on"), "{}", by_default.text);
    let change = |told: &Told| told.verdict().first().unwrap().change.as_ref().unwrap().text.clone();
    let parameter = told_near(&changed(&no_groups, "ro quiet", "ro intel_iommu=off"));
    assert!(change(&parameter).contains("remove intel_iommu=off"), "{}", parameter.text);
    let firmware = told_near(&changed(&no_groups, "sys/firmware/acpi/tables/DMAR =", ""));
    assert!(change(&firmware).contains("VT-d"), "{}", firmware.text);
    let guest = told_near(&changed(&changed(&no_groups, "sys/firmware/acpi/tables/DMAR =", ""), "fpu vmx", "fpu hypervisor"));
    assert!(change(&guest).contains("virtual IOMMU"), "{}", guest.text);
}

#[test]
fn sockets_apart_is_slow_and_says_so() {
    let no_near_gpu = at(&bound(HGX, NEAR), GPU, "class = 0x030200", "class = 0x020000");
    let told = told(&no_near_gpu, Some(NEAR));
    told.is(Route::P2p, Reason::None, Some("across-sockets"));
    assert_eq!(told.path().relation, Relation::AcrossSockets);
    // The two chains have nothing in common, so every link counts.
    assert_eq!(told.path().hops.len(), 4);
    assert!(told.text.contains("NUMA nodes 0 and 1"), "{}", told.text);
}

/// The narrowest link of the whole way up and down is what counts, with the line's encoding.
#[test]
fn the_narrowest_link_limits() {
    let near = bound(HGX, NEAR);
    let told_near = told(&near, Some(NEAR));
    assert_eq!(told_near.path().narrowest().unwrap().below, NEAR);
    assert_eq!(told_near.json["ssds"][0]["pairs"][0]["bytes_per_second"], 7_876_923_077.0);
    // The switch's uplink is on the way too: what the IOMMU translates goes through the root.
    let thin = at(&near, "0000:16:00.0", "_width = 16", "_width = 1");
    let told_thin = told(&thin, Some(NEAR));
    told_thin.is(Route::P2p, Reason::None, Some("uplink-narrow"));
    assert_eq!(told_thin.path().narrowest().unwrap().below, "0000:16:00.0");
    let degraded = at(&near, NEAR, "current_link_width = 4", "current_link_width = 2");
    told(&degraded, Some(NEAR)).is(Route::P2p, Reason::None, Some("link-degraded"));
    let narrow = at(&near, NEAR, "max_link_width = 4", "max_link_width = 8");
    let narrow = at(&narrow, "0000:17:01.0", "max_link_width = 16", "max_link_width = 4");
    told(&narrow, Some(NEAR)).is(Route::P2p, Reason::None, Some("slot-narrow"));
}

/// An idle GPU slows its link down. That is no fault.
#[test]
fn an_idle_gpus_link_is_not_blamed() {
    let idle = at(&bound(HGX, NEAR), GPU, "current_link_speed = 32.0", "current_link_speed = 2.5");
    let told = told(&idle, Some(NEAR));
    told.is(Route::P2p, Reason::None, None);
    assert_eq!((told.path().best().unwrap() / 1e6).round(), 7877.0);
}

#[test]
fn ports_that_refuse_block() {
    let egress = at(&bound(HGX, NEAR), "0000:17:01.0", "acs 001d", "acs 0021");
    let told = told(&egress, Some(NEAR));
    assert_eq!(told.verdict().route, Route::Bounce);
    assert_eq!(told.verdict().first().unwrap().code, "acs-egress");
    assert!(told.command().contains("0000:17:01.0"), "{}", told.text);
}

/// Whether ports keep neighbours apart is read from the ports. That the kernel made two groups
/// proves nothing.
#[test]
fn isolation_is_not_inferred_from_groups() {
    let near = bound(HGX, NEAR);
    let absent = at(&at(&near, "0000:17:00.0", "acs 001d", "acs none"), "0000:17:01.0", "acs 001d", "acs none");
    let without = told(&absent, Some(NEAR));
    without.is(Route::P2p, Reason::None, None);
    assert_eq!(without.codes(), ["acs-absent"]);
    assert!(without.text.contains("no ACS at 0000:17:01.0, 0000:17:00.0:"), "{}", without.text);
    let off = told(&at(&near, "0000:17:01.0", "acs 001d", "acs 0001"), Some(NEAR));
    assert_eq!(off.codes(), ["acs-off"], "{}", off.text);
    assert!(off.text.contains("acs         0000:17:01.0 (switch, downstream): SourceValidation\n"), "{}", off.text);
}

/// Others than root see the header of configuration space only. The path is found all the same.
#[test]
fn what_only_root_may_see_is_said() {
    let mut masked = String::new();
    for line in bound(HGX, NEAR).lines() {
        masked += if line.starts_with("config : ") { "config : 64" } else { line };
        masked.push('\n');
    }
    let masked = changed(&changed(&masked, "Uid:\\t0", "Uid:\\t1000"), "CapEff: 000001ffffffffff", "CapEff: 0000000000000000");
    let told = told(&masked, Some(NEAR));
    told.is(Route::P2p, Reason::None, Some("memlock"));
    assert_eq!((told.path().relation, told.path().hops.len()), (Relation::SameSwitch, 3), "{}", told.text);
    assert_eq!(told.codes(), ["memlock", "acs-unread"]);
    assert!(told.text.contains("memlock     8.0 MiB"), "{}", told.text);
}

#[test]
fn a_user_needs_the_groups_node() {
    let user = changed(&bound(HGX, NEAR), "Uid:\\t0", "Uid:\\t1000");
    // Root may open whatever there is, and runs the tests too: that a user may not is seen in the
    // lab.
    told(&user, Some(NEAR)).is(Route::P2p, Reason::None, None);
    let told = told(&changed(&user, "dev/vfio/15 =\n", ""), Some(NEAR));
    told.is(Route::Bounce, Reason::NoVfio, Some("no-access"));
    assert!(told.text.contains("there is no /dev/vfio/15"), "{}", told.text);
}

#[test]
fn gpus_without_cuda_are_of_no_use() {
    let no_library = changed(HGX, "usr/lib/x86_64-linux-gnu/libcuda.so.1 =", "");
    told(&no_library, Some(NEAR)).is(Route::Host, Reason::NotGpuMemory, Some("no-libcuda"));
    let nouveau = changed(HGX, "drivers/nvidia\n", "drivers/nouveau\n");
    told(&nouveau, Some(NEAR)).is(Route::Host, Reason::NotGpuMemory, Some("gpu-driver"));
    let none = changed(HGX, "class = 0x030200", "class = 0x020000");
    let told = told(&none, Some(NEAR));
    told.is(Route::Host, Reason::NotGpuMemory, None);
    assert_eq!(told.codes(), ["no-gpu"]);
}

/// On a desktop everything behind the chipset is one group.
#[test]
fn a_chipsets_devices_share_one_group() {
    let told = told(DESKTOP, Some("/dev/nvme1n1"));
    told.is(Route::Bounce, Reason::NoVfio, Some("group-shared"));
    for other in ["0000:02:00.0 (1022:43ee, driver xhci_hcd)", "0000:02:00.1 (1022:43eb, driver ahci)", "part of dm-0 (vg-root)"]
    {
        assert!(told.text.contains(other), "{other}: {}", told.text);
    }
    // Without drivers they do no harm.
    let idle =
        changed(&changed(DESKTOP, "driver -> sys/bus/pci/drivers/xhci_hcd\n", ""), "driver -> sys/bus/pci/drivers/ahci\n", "");
    let told_idle = told_of(&idle, Some("/dev/nvme1n1"), None);
    assert!(!told_idle.codes().contains(&"group-shared"), "{}", told_idle.text);
    // Bridges in the group do none either, and are not named.
    assert!(!told.verdict().findings[0].text.contains("0000:03:00.0"), "{}", told.text);
}

#[test]
fn a_desktop_lacks_more_than_a_driver() {
    let told_now = told(DESKTOP, Some("0000:04:00.0"));
    told_now.is(Route::Bounce, Reason::MmapRefused, Some("cuda-too-old"));
    assert_eq!(told_now.codes(), ["cuda-too-old", "bound-to-kernel", "link-degraded", "bar-small"], "{}", told_now.text);
    assert_eq!((told_now.path().relation, told_now.path().forwards), (Relation::SameHostBridge, Forwards::Known));
    // A GPU in the SSD's own group keeps the group from being handed out.
    let together = at(DESKTOP, "0000:01:00.0", "iommu_groups/16", "iommu_groups/14");
    let told_together = told(&together, Some("0000:04:00.0"));
    told_together.is(Route::Bounce, Reason::NoVfio, Some("group-shared"));
    assert!(told_together.verdict().first().unwrap().change.as_ref().unwrap().text.contains("separate SSD and GPU"));
}

/// Two SSDs that share a group are bound together.
#[test]
fn ssds_of_one_group_go_together() {
    let two = at(HGX, FAR, "iommu_groups/35", "iommu_groups/15");
    let told = told(&two, Some(NEAR));
    told.is(Route::Bounce, Reason::NoVfio, Some("group-shared"));
    assert_eq!(told.command(), "gpunvme-vfio bind 0000:19:00.0 0000:9b:00.0");
}

/// A machine as clouds lend it: the GPU is passed through, the disks are the hypervisor's.
#[test]
fn a_lent_gpu_without_an_ssd() {
    let told_disk = told(H200, Some("/dev/vda"));
    told_disk.is(Route::Bounce, Reason::NoVfio, None);
    for words in [
        "NVIDIA H200",
        "driver nvidia 580.159.04, CUDA 13.0",
        "BAR1: 256.0 GiB",
        "1af4:1042, driver virtio-pci",
        "in a virtual machine",
    ] {
        assert!(told_disk.text.contains(words), "{words}: {}", told_disk.text);
    }
    let told = told(H200, None);
    told.is(Route::Bounce, Reason::NoVfio, None);
    assert!(told.text.contains("this machine shows none"), "{}", told.text);
    assert_eq!(told.json["gpus"][0]["bars"][1]["bytes"], 256_u64 << 30);
}

/// Passed through without a port above them, devices have their links all the same.
#[test]
fn passed_through_devices_have_links() {
    let link = "class = 0x010802\ncurrent_link_speed = 8.0 GT/s PCIe\ncurrent_link_width = 4\nmax_link_speed = 8.0 GT/s PCIe\nmax_link_width = 4";
    let told = told(&at(H200, "0000:00:01.0", "class = 0x018000", link), None);
    told.is(Route::Bounce, Reason::NoVfio, Some("no-iommu"));
    assert!(told.verdict().first().unwrap().change.as_ref().unwrap().text.contains("virtual IOMMU"), "{}", told.text);
    assert_eq!(told.path().relation, Relation::SameHostBridge);
    assert_eq!(told.json["ssds"][0]["pairs"][0]["bytes_per_second"], 3_938_461_538.0);
    assert_eq!(told.path().hops.len(), 2, "{}", told.text);
    assert_eq!(told.codes(), ["no-iommu", "no-vfio-module", "cuda-too-old", "bound-to-kernel", "virtual-machine"]);
}

/// The machine that lab/cases/doctor.sh examines live, from recorded files, for machines without
/// QEMU.
#[test]
fn the_labs_machine() {
    let path = |ssd, peer| {
        let told = told_of(QEMU, Some(ssd), Some(peer));
        told.is(Route::Host, Reason::NoVfio, Some("bound-to-kernel"));
        let Path { relation, common, ports, nodes, .. } = told.diagnosis.ssds.into_iter().next().unwrap().pairs.remove(0).path;
        (relation, common, ports.into_iter().map(|port| (port.kind, port.acs)).collect::<Vec<_>>(), nodes)
    };
    // What Linux turns on where a port has it.
    let acs = Acs::Control(0x1d);
    let (root, down) = (Kind::RootPort, Kind::Downstream);
    assert_eq!(
        path("0000:01:00.0", "0000:02:00.0"),
        (Relation::SameHostBridge, None, vec![(root, acs), (root, acs)], [None, None])
    );
    let switch = (
        Relation::SameSwitch,
        Some("0000:03:00.0".to_owned()),
        vec![(down, Acs::Absent), (root, acs), (down, Acs::Absent)],
        [None, None],
    );
    assert_eq!(path("0000:05:00.0", "0000:06:00.0"), switch);
    let plain = vec![(root, Acs::Absent), (root, Acs::Absent)];
    assert_eq!(path("0000:07:00.0", "0000:08:00.0"), (Relation::SameHostBridge, None, plain, [None, None]));
    let apart = (Relation::AcrossSockets, None, vec![(root, acs), (root, acs)], [Some(0), Some(1)]);
    assert_eq!(path("0000:41:00.0", "0000:81:00.0"), apart);
}

/// A BAR that is to stand in for a GPU's can be mapped only while no driver has the device, and
/// has to be there.
#[test]
fn a_peer_is_free_and_has_memory() {
    let text = bound(HGX, NEAR);
    let told = |text: &str, peer| told_of(text, Some(NEAR), Some(peer));
    told(&text, "0000:3a:00.0").is(Route::Host, Reason::NotABuffer, Some("peer-driven"));
    told(&at(&text, "0000:3a:00.0", "driver -> sys/bus/pci/drivers/nvme\n", ""), "0000:3a:00.0").is(
        Route::P2p,
        Reason::None,
        None,
    );
    // What blocks comes before what slows.
    told(&text, FAR).is(Route::Host, Reason::NotABuffer, Some("peer-driven"));
    told(&text, "0000:15:00.0").is(Route::Host, Reason::NotABuffer, None);
}

#[test]
fn what_gpus_lack_counts_for_every_device_of_a_mount() {
    let of = |text: &str| {
        let Expanded { tree, container, .. } = &expand(text);
        limit(tree, &Machine::read(tree, container.clone())).map(|(route, reason, _)| (route, reason))
    };
    assert_eq!(of(HGX), None);
    assert_eq!(of(H200), Some((Route::Bounce, Reason::MmapRefused)));
    assert_eq!(of(&changed(DESKTOP, "drivers/nvidia\n", "drivers/nouveau\n")), Some((Route::Host, Reason::NotGpuMemory)));
    let nothing = of(QEMU).unwrap();
    let doctor = told(QEMU, Some("sim:/disk")).diagnosis;
    let verdict = doctor.verdict().unwrap();
    assert_eq!((nothing, verdict.findings[0].code), ((verdict.route, verdict.reason), "no-gpu"), "doctor says the same");
}

/// What a machine shows that gives cuFile all it needs.
const FOR_P2PDMA: &str = "boot/config-6.8.0-51-generic = CONFIG_PCI_P2PDMA=y\\nCONFIG_DMABUF_TOKEN=y\n\
    proc/sys/kernel/io_uring_disabled = 0\n\
    proc/driver/nvidia/params = RegistryDwords: \"RMForceStaticBar1=1;RMForceDisableIomapWC=1\"\n\
    sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0/p2pmem/size = 137438953472\n";

/// Whether each way is possible: ours, io_uring's, cuFile's with P2PDMA, cuFile's with nvidia-fs.
fn possible(text: &str) -> Vec<Option<bool>> {
    told(text, Some(NEAR)).diagnosis.ssds[0].pairs[0].ways.iter().map(|way| way.possible).collect()
}

#[test]
fn each_way_lacks_what_the_machine_does_not_have() {
    let passes = changed(HGX, "iommu_groups/15/type = DMA-FQ", "iommu_groups/15/type = identity");
    let ready = format!("{FOR_P2PDMA}{passes}");
    assert_eq!(possible(&ready), [Some(false), Some(true), Some(true), Some(false)]);
    assert_eq!(possible(&bound(&ready, NEAR)), [Some(true), Some(false), Some(false), Some(false)], "it is ours then");
    assert_eq!(possible(&format!("sys/module/nvidia_fs/ =\n{ready}"))[3], Some(true));
    // Nothing is said of what the machine does not show.
    assert_eq!(possible(HGX)[1], Some(false), "io_uring is not there");
    let hidden = changed(&ready, "boot/config-6.8.0-51-generic", "boot/config-other");
    assert_eq!(possible(&hidden), [Some(false), None, None, Some(false)]);
    let lacks = |text: &str, way: usize| {
        let told = told(text, Some(NEAR));
        let way = &told.diagnosis.ssds[0].pairs[0].ways[way];
        assert_eq!(way.possible, Some(false));
        assert!(told.text.contains(way.lacks.as_ref().unwrap()), "{}", told.text);
        way.lacks.clone().unwrap()
    };
    for (way, from, to, words) in [
        (1, "CONFIG_DMABUF_TOKEN=y", "# CONFIG_DMABUF_TOKEN is not set", "without CONFIG_DMABUF_TOKEN"),
        (1, "io_uring_disabled = 0", "io_uring_disabled = 2", "is 2"),
        (2, "CONFIG_PCI_P2PDMA=y", "CONFIG_X=y", "without CONFIG_PCI_P2PDMA"),
        (2, "UNIX Open Kernel Module for x86_64", "UNIX x86_64 Kernel Module", "closed"),
        (2, "15/type = identity", "15/type = DMA", "(DMA)"),
        (2, "RMForceStaticBar1=1;", "", "NVreg_RegistryDwords=\"RMForceStaticBar1=1\""),
        (2, "nvme1/nvme1n1]", "nvme1/nvme1c0n1]", "nvme_core.multipath=N"),
    ] {
        let mut text = changed(&ready, from, to);
        if words.contains("Registry") {
            text = text.replace("p2pmem/size = 137438953472", "p2pmem/size = 0");
        }
        assert!(lacks(&text, way).contains(words), "{words}: {}", lacks(&text, way));
    }
    // A newer kernel wants a newer driver.
    let newer = changed(&ready, "6.8.0-51-generic", "6.15.0");
    assert_eq!(possible(&newer)[2], Some(true));
    assert!(lacks(&changed(&newer, "610.43.02", "595.58.03"), 2).contains("595.71.05 or newer, and this is 595.58.03"));
    assert_eq!(possible(&changed(&newer, "610.43.02", "595.71.05"))[2], Some(true));
    assert!(lacks(&changed(&ready, "6.8.0-51-generic", "6.1.0"), 2).contains("6.2 or newer"));
}
