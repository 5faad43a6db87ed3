//! Random bytes from the system.

use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes that cannot be guessed.
///
/// # Errors
/// A text: the system has none.
pub fn random() -> Result<[u8; 16], String> {
    let mut bytes = [0; 16];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        Ok(_) => Err("the system gave too few random bytes".to_owned()),
        Err(error) => Err(format!("random bytes: {error}")),
    }
}
