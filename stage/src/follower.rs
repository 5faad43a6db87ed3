//! A program that reads along (`hydrate --follow`). It is told what of which files is there, and
//! lent the buffers of parts that have arrived: what it copies from there it need not read from the
//! volume. Its end of the socket is standard input of this program.
//!
//! It guards the hydration from the other program. It lends half of the buffers at most, waits a
//! moment for one to come back, and a part that it does not lend is told when it is in the volume.
//! A buffer that is lent is not used for anything else until it is given back, or the other
//! program has closed its end.

use crate::error::{Error, Result};
use crate::memory::Lease;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketType};
use std::collections::{HashMap, HashSet};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a part waits for a buffer to be given back, and an event for room in the socket.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of a file.
#[derive(Clone, Copy, serde::Serialize)]
pub struct Part<'a> {
    /// The file's name in the set.
    pub name: &'a str,
    /// Its partial file.
    pub partial: &'a str,
    pub offset: u64,
    pub len: u64,
    /// Bytes of the whole file.
    pub size: u64,
}

/// What happens to a file.
#[derive(serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event<'a> {
    /// It is whole and has its name. `modified` is its time of modification, in nanoseconds.
    There { name: &'a str, size: u64, modified: i64 },
    /// These bytes of it are in its partial file, not checked.
    Written(Part<'a>),
    /// These bytes of it are in a buffer that is lent, not checked.
    Lent {
        #[serde(flatten)]
        part: Part<'a>,
        buffer: u64,
    },
    /// What was written and lent of it counts no more.
    Dropped { name: &'a str },
    /// All files are there.
    Ended {},
}

/// The other program.
#[derive(Debug)]
pub struct Follower {
    socket: OwnedFd,
    /// Buffers that may be lent at once.
    most: usize,
    state: Mutex<State>,
    /// A buffer was given back, or the other program is lost.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lent: HashMap<u64, Arc<Lease>>,
    /// The buffers whose descriptors it has.
    known: HashSet<u64>,
    /// It gave nothing back for as long as a part waits.
    is_behind: bool,
    /// It is told nothing more.
    is_lost: bool,
}

impl State {
    fn lends(&self, most: usize) -> bool {
        !self.is_lost && self.lent.len() < most
    }
}

impl Follower {
    /// The one at the other end of standard input, who may be lent half of `buffers`.
    ///
    /// # Errors
    /// [`Error::NoFollower`].
    pub fn of_standard_input(buffers: usize) -> Result<Arc<Follower>> {
        let input = std::io::stdin();
        if !rustix::net::sockopt::socket_type(&input).is_ok_and(|kind| kind == SocketType::SEQPACKET) {
            return Err(Error::NoFollower);
        }
        let socket = rustix::io::fcntl_dupfd_cloexec(&input, 0).map_err(|_| Error::NoFollower)?;
        let state = State { is_behind: buffers < 2, ..State::default() };
        let follower = Arc::new(Follower { socket, most: buffers / 2, state: Mutex::new(state), changed: Condvar::new() });
        let listening = follower.clone();
        std::thread::spawn(move || listening.listen());
        Ok(follower)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes back what is given back, until the other end is closed.
    fn listen(&self) {
        let mut buffer = [0; 8];
        loop {
            match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::empty()) {
                Ok((8, _)) => {
                    let mut state = self.state();
                    let lease = state.lent.remove(&u64::from_ne_bytes(buffer));
                    state.is_behind &= lease.is_none();
                    drop(state);
                    drop(lease);
                    self.changed.notify_all();
                }
                Err(Errno::INTR) => {}
                // The other program may have made its end such, and with it this one.
                Err(Errno::AGAIN) => {
                    let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)], None);
                }
                _ => break,
            }
        }
        let mut state = self.state();
        state.is_lost = true;
        let lent = std::mem::take(&mut state.lent);
        drop(state);
        drop(lent);
        self.changed.notify_all();
    }

    /// Lends the buffer that a part is in, and says whether it did.
    pub fn lend(&self, part: Part<'_>, lease: &Arc<Lease>) -> bool {
        let Some(memory) = lease.shared() else { return false };
        let buffer = memory.id();
        let mut state = self.state();
        if !state.lends(self.most) && !state.is_behind {
            let waits = |state: &mut State| !state.lends(self.most) && !state.is_lost;
            let waited = self.changed.wait_timeout_while(state, PATIENCE, waits);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.is_behind = !state.lends(self.most);
        }
        if !state.lends(self.most) {
            return false;
        }
        let descriptor = match state.known.contains(&buffer) {
            true => None,
            // Without a descriptor to spare the part is told when it is in the volume.
            false => match memory.memory().to_read() {
                Ok(descriptor) => Some(descriptor),
                Err(_) => return false,
            },
        };
        state.lent.insert(buffer, lease.clone());
        state.known.insert(buffer);
        drop(state);
        let is_told = self.send(&Event::Lent { part, buffer }, descriptor.as_ref().map(AsFd::as_fd));
        if !is_told {
            self.state().lent.remove(&buffer);
        }
        is_told
    }

    /// Tells of an event.
    pub fn tell(&self, event: &Event<'_>) {
        self.send(event, None);
    }

    /// Sends an event and a descriptor, and says whether the other program gets them. One that does
    /// not take events for a while is told nothing more, and finds the end of what it is told.
    fn send(&self, event: &Event<'_>, memory: Option<BorrowedFd<'_>>) -> bool {
        if self.state().is_lost {
            return false;
        }
        let text = serde_json::to_vec(event).expect("names and numbers have a form in JSON");
        let memory = memory.as_slice();
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !memory.is_empty() {
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(memory)), "the space was made for one descriptor");
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(&text)], &mut ancillary, flags) {
                Ok(_) => return true,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.has_room() => {}
                Err(_) => break,
            }
        }
        self.state().is_lost = true;
        self.changed.notify_all();
        // Where the other end is closed it knows already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        false
    }

    /// Waits a moment for room in the socket.
    fn has_room(&self) -> bool {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let mut polled = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::OUT)];
        !matches!(rustix::event::poll(&mut polled, Some(&patience)), Ok(0))
    }
}
