//! The syntax of DEVICE strings: a path, or `BACKEND:TARGET` with options after commas, such as
//! `vfio:0000:01:00.0,ns=2,depth=64`.
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::{Error, Result};

/// A DEVICE string of the form `BACKEND:TARGET[,name=value...]`. The driver and the backend take
/// the options that they know; an option that is left over is an error.
pub(crate) struct DeviceName<'a> {
    device: &'a str,
    pub(crate) backend: Backend,
    /// What the backend opens.
    pub(crate) target: &'a str,
    options: Vec<(&'a str, &'a str)>,
}

/// What reaches the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// A PCI function, through VFIO.
    Vfio,
    /// A software controller in this process.
    Sim,
}

impl<'a> DeviceName<'a> {
    /// Takes a DEVICE string apart, if it is of this form.
    pub(crate) fn parse(device: &'a str) -> Option<Self> {
        let (backend, rest) = device.split_once(':')?;
        let backend = match backend {
            "vfio" => Backend::Vfio,
            "sim" => Backend::Sim,
            _ => return None,
        };
        let mut words = rest.split(',');
        let target = words.next()?;
        let options = words.map(|word| word.split_once('=').unwrap_or((word, ""))).collect();
        Some(Self { device, backend, target, options })
    }

    /// The whole string.
    pub(crate) fn device(&self) -> Arc<str> {
        self.device.into()
    }

    /// The value of an option, if it was given.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a str> {
        let at = self.options.iter().position(|(option, _)| *option == name)?;
        Some(self.options.remove(at).1)
    }

    /// The value of an option that `parse` understands.
    pub(crate) fn take_as<T>(&mut self, name: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| self.refuse(format!("option {name}={value}: expected {expected}")))
    }

    /// Refuses options that nothing took.
    pub(crate) fn finish(&self) -> Result<()> {
        match self.options.first() {
            Some((name, _)) => Err(self.refuse(format!("there is no option {name:?} here, or it was given twice"))),
            None => Ok(()),
        }
    }

    fn refuse(&self, reason: String) -> Error {
        Error::Unsupported { device: self.device(), reason }
    }
}

/// `30`, `30s` or `250ms`. Not 0.
pub(crate) fn duration(value: &str) -> Option<Duration> {
    let duration = match value.strip_suffix("ms") {
        Some(number) => Duration::from_millis(number.parse().ok()?),
        None => Duration::from_secs(value.strip_suffix('s').unwrap_or(value).parse::<u32>().ok()?.into()),
    };
    (!duration.is_zero()).then_some(duration)
}

/// The part of a DEVICE string that names the device, without options for its use:
/// `vfio:0000:01:00.0` for `vfio:0000:01:00.0,ns=2`. Two strings that agree in it name one device,
/// or namespaces that only one process can have. A path is returned as it is.
pub fn without_options(device: &str) -> &str {
    let is_controller = ["vfio:", "sim:"].iter().any(|backend| device.starts_with(backend));
    if is_controller { device.split(',').next().unwrap_or(device) } else { device }
}

/// The DEVICE strings of several controllers that are named as one: `vfio:A+vfio:B`. Any other
/// string is one DEVICE.
pub fn split_names(device: &str) -> Vec<&str> {
    let begins = |text: &str| text.starts_with("vfio:") || text.starts_with("sim:");
    if !begins(device) {
        return vec![device];
    }
    let mut names = Vec::new();
    let mut start = 0;
    for (at, _) in device.match_indices('+').filter(|(at, _)| begins(&device[at + 1..])) {
        names.push(&device[start..at]);
        start = at + 1;
    }
    names.push(&device[start..]);
    names
}

/// The image file or block device under a DEVICE string; `None` for a PCI function (`vfio:`).
pub fn path_of(device: &str) -> Option<&Path> {
    let device = without_options(device);
    match device.strip_prefix("sim:") {
        Some(path) => Some(Path::new(path)),
        None if device.starts_with("vfio:") => None,
        None => Some(Path::new(device)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_colon_is_a_path_unless_a_backend_is_before_it() {
        assert!(DeviceName::parse("vfiox:1").is_none() && DeviceName::parse("vfio").is_none());
    }

    #[test]
    fn several_controllers_are_named_as_one() {
        let cases: [(&str, &[&str]); 4] = [
            ("/img/a+b", &["/img/a+b"]),
            ("/img/a+sim:b", &["/img/a+sim:b"]),
            ("sim:/img/a+b,ns=2+sim:c", &["sim:/img/a+b,ns=2", "sim:c"]),
            ("vfio:0000:01:00.0+vfio:0000:02:00.0,depth=8+sim:x", &["vfio:0000:01:00.0", "vfio:0000:02:00.0,depth=8", "sim:x"]),
        ];
        for (device, names) in cases {
            assert_eq!(split_names(device), names);
        }
    }

    #[test]
    fn names_of_devices_are_told_from_their_options() {
        let cases = [
            ("/dev/nvme0n1", "/dev/nvme0n1", Some("/dev/nvme0n1")),
            ("a,b", "a,b", Some("a,b")),
            ("vfio:0000:01:00.0,ns=2", "vfio:0000:01:00.0", None),
            ("sim:/tmp/x,ns=2,vwc=on", "sim:/tmp/x", Some("/tmp/x")),
        ];
        for (device, name, path) in cases {
            assert_eq!((without_options(device), path_of(device)), (name, path.map(Path::new)));
        }
    }
}
