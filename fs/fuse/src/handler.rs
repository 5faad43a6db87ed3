//! What a transport serves: a filesystem that takes requests.

use crate::reply::Reply;
use crate::request::{Forgets, Request};

/// A filesystem, as the kernel's requests see it.
pub trait Handler: Send + Sync + 'static {
    /// Serves a request, on a loop: the next one waits until this returns. The reply may be given
    /// later, from any thread.
    fn request(&self, request: Request<'_>, reply: Reply);

    /// Notes what the kernel has forgotten, on a loop.
    fn forget(&self, forgets: Forgets<'_>);
}
