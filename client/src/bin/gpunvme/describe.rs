//! The commands `info` and `map`: reports about a mount and its files that move no data.

use crate::doctor::without_peer_to_peer;
use crate::report::{self, Failure, Report};
use gpunvme::{ExtentFlags, File, Mount};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

pub fn info(path: &Path) -> Result<Report, Failure> {
    let info = Mount::open(path)?.info()?;
    // What the mount can do with memory of a device is of use where there is a GPU to have some.
    let (route, reason, why) = match without_peer_to_peer() {
        Some((route, reason, text)) if route > info.route => (route, reason, text),
        _ => (info.route, info.reason, info.reason.explain().to_owned()),
    };
    let mut report = Report::new(json!({
        "device": info.device,
        "label": info.label,
        "uuid": report::uuid(&info.uuid),
        "daemon": info.daemon,
        "read_only": info.read_only,
        "transport": info.transport.name(),
        "transport_refusal": info.transport.refusal(),
        "threads": info.threads,
        "cache": info.cache,
        "write_buffer": info.write_buffer,
        "commit": info.commit.as_secs(),
        "discard": info.discard,
        "capacity": info.capacity,
        "free": info.free,
        "block_size": info.block_size,
        "logical_block": info.logical_block,
        "memory_alignment": info.memory_alignment,
        "devices": info.devices,
        "sets": info.sets,
        "stripe_unit": info.stripe_unit,
        "max_transfer": info.max_transfer,
        "max_segments": info.max_segments,
        "max_buffers": info.max_buffers,
        "max_buffer_bytes": info.max_buffer_bytes,
        "gpu_route": route.name(),
        "gpu_reason": reason.name(),
        "mount_route": info.route.name(),
        "mount_reason": info.reason.name(),
        "socket": info.socket,
    }));
    report.line("device", &info.device);
    if info.devices > 1 {
        let sets = if info.sets > 1 { format!(" in {} sets", info.sets) } else { String::new() };
        report.line("striped", format!("over {} devices{sets}, in units of {}", info.devices, report::size(info.stripe_unit)));
    }
    report.line("label", if info.label.is_empty() { "none" } else { &info.label });
    report.line("uuid", report::uuid(&info.uuid));
    report.line("mounted", format!("{}, by {}", if info.read_only { "read-only" } else { "read-write" }, info.daemon));
    let refusal = info.transport.refusal().map(|refusal| format!(": {refusal}")).unwrap_or_default();
    report.line("transport", format!("{}{refusal}", info.transport.name()));
    let (cache, write_buffer) = (report::size(info.cache), report::size(info.write_buffer));
    report.line(
        "settings",
        format!(
            "cache {cache}, write buffer {write_buffer}, commit {} s, {} threads{}",
            info.commit.as_secs(),
            info.threads,
            if info.discard { ", discard" } else { "" }
        ),
    );
    report.line("capacity", format!("{}, {} free", report::size(info.capacity), report::size(info.free)));
    report.line("blocks", format!("{} bytes, on logical blocks of {}", info.block_size, info.logical_block));
    report.line("memory", format!("goes direct when aligned to {} bytes", info.memory_alignment));
    report.line("buffers", format!("at most {} of a process, {} in them", info.max_buffers, report::size(info.max_buffer_bytes)));
    report.line("one ioctl", format!("at most {}, in {} segments", report::size(info.max_transfer), info.max_segments));
    report.line("socket", if info.socket.is_empty() { "none" } else { &info.socket });
    report.line("gpu route", route);
    let alone = if route == info.route { String::new() } else { format!("; the mount itself can do {}", info.route) };
    report.line("reason", format!("{reason}: {why}{alone}"));
    Ok(report)
}

pub fn map(path: &Path) -> Result<Report, Failure> {
    let file = File::open(path)?;
    let info = file.mount()?.info()?;
    let size = file.size()?;
    // Of several devices each has logical blocks of its own.
    let is_alone = info.devices <= 1;
    let block = if is_alone { u64::from(info.logical_block.max(1)) } else { 1 };
    let mut extents: Vec<Value> = Vec::new();
    let mut lines = String::new();
    for extent in file.resolve(0, u64::MAX) {
        let extent = extent?;
        let unwritten = extent.flags().contains(ExtentFlags::UNWRITTEN);
        let (place, len) = (extent.device_offset / block, extent.len / block);
        // Writing to a String cannot fail.
        let _ = writeln!(
            lines,
            "{:>5} {:>16} {:>16} {:>6} {:>16} {:>14}{}",
            extents.len(),
            extent.file_offset,
            extent.len,
            extent.device,
            place,
            len,
            if unwritten { "  unwritten" } else { "" }
        );
        extents.push(json!({
            "file_offset": extent.file_offset,
            "device_offset": extent.device_offset,
            "length": extent.len,
            "device": extent.device,
            "lba": is_alone.then_some(place),
            "unwritten": unwritten,
        }));
    }
    let mut report = Report::new(json!({
        "file": path.to_string_lossy(),
        "size": size,
        "device": info.device,
        "logical_block": info.logical_block,
        "extents": extents,
    }));
    let count = report.json["extents"].as_array().map_or(0, Vec::len);
    let noun = if count == 1 { "extent" } else { "extents" };
    let blocks = if is_alone { format!(" (logical blocks of {block} bytes)") } else { String::new() };
    report.text = format!("{}: {size} bytes, {count} {noun} on {}{blocks}\n", path.display(), info.device);
    if count > 0 {
        let (place, len) = if is_alone { ("first LBA", "LBAs") } else { ("device offset", "bytes") };
        report.text += &format!("{:>5} {:>16} {:>16} {:>6} {place:>16} {len:>14}\n", "#", "file offset", "length", "device");
        report.text += &lines;
    }
    Ok(report)
}
