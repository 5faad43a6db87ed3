//! Prints what a controller reported, for people and for programs.

use crate::report::{self, Report};
use gpunvme_blockdev::nvme::{ControllerInfo, ErrorEntry, NamespaceInfo, Register, Smart};
use serde_json::{Value, json};
use std::fmt::Write;

/// Bytes in a data unit of the SMART log.
const DATA_UNIT: u128 = 512_000;
/// 0 °C.
const FREEZING: i32 = 273;
/// Bits of the critical warning.
const WARNINGS: [&str; 6] = [
    "spare below its threshold",
    "temperature",
    "reliability degraded",
    "read-only",
    "backup of volatile memory failed",
    "persistent memory region",
];

pub fn identify(info: &ControllerInfo, namespaces: &[NamespaceInfo]) -> Report {
    let (major, minor, tertiary) = info.version;
    let version = format!("{major}.{minor}.{tertiary}");
    let mut report = Report::new(json!({
        "model": info.model,
        "serial": info.serial,
        "firmware": info.firmware,
        "subsystem": info.subsystem,
        "vendor": info.vendor,
        "nvme_version": version,
        "capacity": number(info.capacity),
        "max_transfer": info.max_transfer,
        "max_namespaces": info.max_namespaces,
        "volatile_cache": info.volatile_cache,
        "sgl": info.sgl,
        "shadow_doorbells": info.shadow_doorbells,
        "format": info.format,
        "format_all": info.format_all,
        "subsystem_reset": info.subsystem_reset,
        "namespaces": namespaces_json(namespaces),
    }));
    report.line("model", &info.model);
    report.line("serial", &info.serial);
    report.line("firmware", &info.firmware);
    report.line("vendor", format!("{:#06x}", info.vendor));
    report.line("subsystem", &info.subsystem);
    report.line("version", version);
    if info.capacity > 0 {
        report.line("capacity", report::size(number(info.capacity)));
    }
    report.line(
        "one command",
        info.max_transfer.map_or("any number of bytes".into(), |bytes| format!("at most {}", report::size(bytes))),
    );
    let has = [
        (info.volatile_cache, "volatile write cache"),
        (info.sgl, "SGLs"),
        (info.shadow_doorbells, "shadow doorbells"),
        (info.format, if info.format_all { "format (of all namespaces at once)" } else { "format" }),
        (info.subsystem_reset, "subsystem reset"),
    ];
    let has: Vec<&str> = has.iter().filter(|(has, _)| *has).map(|(_, what)| *what).collect();
    report.line("has", if has.is_empty() { "nothing optional".into() } else { has.join(", ") });
    report.line("namespaces", format!("{} of at most {}", namespaces.len(), info.max_namespaces));
    report.text += &namespaces_text(namespaces);
    report
}

pub fn namespaces(namespaces: &[NamespaceInfo]) -> Report {
    let mut report = Report::new(json!({ "namespaces": namespaces_json(namespaces) }));
    report.text = if namespaces.is_empty() { "no active namespaces\n".into() } else { namespaces_text(namespaces) };
    report
}

fn namespaces_text(namespaces: &[NamespaceInfo]) -> String {
    let mut text = String::new();
    for namespace in namespaces {
        let blocks = |block: u32, metadata: u16| match metadata {
            0 => format!("{block}"),
            metadata => format!("{block}+{metadata}"),
        };
        let formats: Vec<_> = namespace.formats.iter().map(|format| blocks(format.logical_block, format.metadata)).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<12}{}, blocks of {} bytes{}; can have {}",
            format!("ns={}", namespace.id),
            report::size(namespace.len),
            blocks(namespace.logical_block, namespace.metadata),
            if namespace.read_only { ", write protected" } else { "" },
            formats.join(", "),
        );
    }
    text
}

fn namespaces_json(namespaces: &[NamespaceInfo]) -> Value {
    let formats = |namespace: &NamespaceInfo| -> Vec<Value> {
        let formats = namespace.formats.iter();
        let format = formats.map(|format| {
            json!({
                "index": format.index,
                "logical_block": format.logical_block,
                "metadata": format.metadata,
                "performance": format.performance,
            })
        });
        format.collect()
    };
    let namespace = |namespace: &NamespaceInfo| {
        json!({
            "id": namespace.id,
            "bytes": namespace.len,
            "logical_block": namespace.logical_block,
            "metadata": namespace.metadata,
            "read_only": namespace.read_only,
            "formats": formats(namespace),
        })
    };
    namespaces.iter().map(namespace).collect()
}

pub fn smart(smart: &Smart) -> Report {
    let celsius = i32::from(smart.temperature) - FREEZING;
    let warnings: Vec<&str> = (0..8)
        .filter(|bit| smart.critical_warning >> bit & 1 == 1)
        .map(|bit| WARNINGS.get(bit).copied().unwrap_or("reserved"))
        .collect();
    let (read, written) =
        (number(smart.data_units_read.saturating_mul(DATA_UNIT)), number(smart.data_units_written.saturating_mul(DATA_UNIT)));
    let mut report = Report::new(json!({
        "critical_warning": smart.critical_warning,
        "warnings": warnings,
        "temperature_celsius": celsius,
        "available_spare_percent": smart.available_spare,
        "available_spare_threshold_percent": smart.available_spare_threshold,
        "percentage_used": smart.percentage_used,
        "bytes_read": read,
        "bytes_written": written,
        "host_reads": number(smart.host_reads),
        "host_writes": number(smart.host_writes),
        "busy_minutes": number(smart.busy_time),
        "power_cycles": number(smart.power_cycles),
        "power_on_hours": number(smart.power_on_hours),
        "unsafe_shutdowns": number(smart.unsafe_shutdowns),
        "media_errors": number(smart.media_errors),
        "error_log_entries": number(smart.error_log_entries),
    }));
    report.line("warnings", if warnings.is_empty() { "none".into() } else { warnings.join(", ") });
    report.line("temperature", format!("{celsius} °C"));
    report.line("spare", format!("{} %, and {} % is too little", smart.available_spare, smart.available_spare_threshold));
    report.line("worn", format!("{} %", smart.percentage_used));
    report.line("read", format!("{} in {} commands", report::size(read), smart.host_reads));
    report.line("written", format!("{} in {} commands", report::size(written), smart.host_writes));
    report.line("busy", format!("{} minutes", smart.busy_time));
    report.line(
        "power",
        format!(
            "on for {} hours, {} cycles, {} of them unsafe",
            smart.power_on_hours, smart.power_cycles, smart.unsafe_shutdowns
        ),
    );
    report.line("errors", format!("{} of the media, {} logged", smart.media_errors, smart.error_log_entries));
    report
}

pub fn errors(entries: &[ErrorEntry]) -> Report {
    let entry = |entry: &ErrorEntry| {
        json!({
            "count": entry.count,
            "queue": entry.queue,
            "command": entry.command,
            "status": entry.status.name(),
            "status_type": entry.status.kind(),
            "status_code": entry.status.code(),
            "lba": entry.lba,
            "namespace": entry.namespace,
        })
    };
    let mut report = Report::new(json!({ "errors": entries.iter().map(entry).collect::<Vec<_>>() }));
    if entries.is_empty() {
        report.text = "no errors\n".into();
        return report;
    }
    report.text = format!("{:>8} {:>6} {:>8} {:>10} {:>16}  status\n", "count", "queue", "command", "namespace", "LBA");
    for ErrorEntry { count, queue, command, status, lba, namespace } in entries {
        // Writing to a String cannot fail.
        let _ = writeln!(report.text, "{count:>8} {queue:>6} {command:>8} {namespace:>10} {lba:>16}  {status}");
    }
    report
}

pub fn registers(registers: &[Register]) -> Report {
    let register = |register: &Register| {
        json!({
            "offset": register.offset,
            "name": register.name,
            "bytes": register.size,
            "value": register.value,
            "means": meaning(register),
        })
    };
    let mut report = Report::new(json!({ "registers": registers.iter().map(register).collect::<Vec<_>>() }));
    for register in registers {
        let value = format!("{:#0width$x}", register.value, width = 2 + 2 * usize::from(register.size));
        // Writing to a String cannot fail.
        let _ = writeln!(report.text, "{:#06x}  {:<7} {value:<18}  {}", register.offset, register.name, meaning(register));
    }
    report
}

/// The fields of the registers that are looked at most (Base 3.1.3).
fn meaning(register: &Register) -> String {
    let bits = |low: u32, count: u32| register.value >> low & ((1 << count) - 1);
    match register.name {
        "CAP" => format!(
            "queues of {} entries, ready within {} ms, doorbells {} bytes apart, pages of 2^{} to 2^{} bytes{}",
            bits(0, 16) + 1,
            bits(24, 8) * 500,
            4 << bits(32, 4),
            12 + bits(48, 4),
            12 + bits(52, 4),
            if bits(36, 1) == 1 { ", subsystem reset" } else { "" },
        ),
        "VS" => format!("NVMe {}.{}.{}", bits(16, 16), bits(8, 8), bits(0, 8)),
        "CC" => format!(
            "{}, pages of 2^{} bytes, {}",
            if bits(0, 1) == 1 { "enabled" } else { "disabled" },
            12 + bits(7, 4),
            ["no shutdown", "normal shutdown", "abrupt shutdown", "reserved"][bits(14, 2) as usize],
        ),
        "CSTS" => {
            let flags =
                [(bits(0, 1), "ready"), (bits(1, 1), "fatal"), (bits(4, 1), "subsystem was reset"), (bits(5, 1), "paused")];
            let mut words: Vec<&str> = flags.iter().filter(|(set, _)| *set == 1).map(|(_, word)| *word).collect();
            words.push(["no shutdown", "shutting down", "shut down", "reserved"][bits(2, 2) as usize]);
            words.join(", ")
        }
        "AQA" => format!("admin queues of {} and {} entries", bits(0, 12) + 1, bits(16, 12) + 1),
        _ => String::new(),
    }
}

/// Counters of 128 bits, as far as JSON's readers take them.
fn number(counter: u128) -> u64 {
    u64::try_from(counter).unwrap_or(u64::MAX)
}
