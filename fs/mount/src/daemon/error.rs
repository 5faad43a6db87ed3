//! Errors of mounting, in mount(8)'s terms.

/// A mount that failed. Each kind is one of mount(8)'s exit codes; the text names what is wrong
/// and what to do about it. The program prints it as `mount.gpunvme: DEVICE: TEXT`.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MountError {
    /// The command line, the options or the configuration file are wrong, or the caller may not
    /// mount.
    #[error("{0}")]
    Usage(String),
    /// The system refused something that every program may ask for: a process, a thread, memory.
    #[error("{0}")]
    System(String),
    /// The daemon ended without a word, or with a panic.
    #[error("{0}")]
    Internal(String),
    /// A signal came before the mount was live.
    #[error("interrupted before the mount was live")]
    Interrupted,
    /// The device, the volume on it or the directory cannot be mounted.
    #[error("{0}")]
    Failed(String),
    /// It was unmounted, and whether everything is on the device cannot be told.
    #[error("{0}")]
    Unknown(String),
}

impl MountError {
    /// The exit code of mount(8) for this kind of failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 1,
            Self::System(_) => 2,
            Self::Internal(_) => 4,
            Self::Interrupted => 8,
            Self::Failed(_) => 32,
            Self::Unknown(_) => 64,
        }
    }
}
