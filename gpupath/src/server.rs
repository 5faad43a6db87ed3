//! The daemon's answers to commands, apart from those that need the filesystem.
//!
//! The FUSE front end decodes an ioctl with [`abi::decode`] and hands `REGISTER`, `UNREGISTER`,
//! `STATS`, `READ` and `WRITE` to the [`Server`]; the last two come back to the filesystem as
//! [`Admitted`] transfers ([`crate::admission`]). Every answer is a [`Reply`], or becomes one, and
//! every call is counted once. The registration socket uses the same server.

use crate::access::{self, Access, FileId};
#[cfg(doc)]
use crate::admission::Admitted;
use crate::admission::{Asked, OpenFile, Requester};
use crate::calling_thread;
use crate::foreign::Foreign;
use crate::grants::Grants;
use crate::intake::Turn;
use crate::outcome::Answer;
use crate::process::{Client, Identity, Process};
use crate::rate_limit::RateLimit;
use crate::registry::{Buffer, Caller, Registry, RegistryError};
use crate::stats::Stats;
use gpunvme_abi::{self as abi, Claim, Command, Direction, Grant, Reason, Register, Route, TransferRequest, Unregister};
use std::io;
use std::sync::{Arc, OnceLock};
use zerocopy::{Immutable, IntoBytes};

/// The answer to an ioctl: what FUSE's ioctl reply takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// 0, or a negative errno. The kernel copies `data` out in either case.
    pub result: i32,
    /// What is copied back over the argument, from its beginning.
    pub data: Vec<u8>,
}

impl Reply {
    /// An answer with a structure; `errno` is 0 or positive.
    pub fn new<T: IntoBytes + Immutable>(errno: i32, value: &T) -> Reply {
        Reply { result: -errno, data: value.as_bytes().to_vec() }
    }

    /// An answer with a structure and the entries behind it.
    pub fn with_entries<T: IntoBytes + Immutable, E: IntoBytes + Immutable>(value: &T, entries: &[E]) -> Reply {
        let mut data = value.as_bytes().to_vec();
        data.extend_from_slice(entries.as_bytes());
        Reply { result: 0, data }
    }

    /// A failure that has nothing more to say.
    pub fn error(errno: i32) -> Reply {
        Reply { result: -errno, data: Vec::new() }
    }
}

/// What is left to be done, on a thread that may submit to the device.
pub type Task = Box<dyn FnOnce() + Send>;

/// What was found of a process, the access that it has to a file, and a grant of that.
pub(crate) type Shown<T> = (T, Access, u64);

/// The daemon's end of the direct path for one mount.
pub struct Server {
    /// The buffers.
    pub registry: Registry,
    /// The counters.
    pub stats: Arc<Stats>,
    /// Messages about rings whose applications broke them.
    pub(crate) broken_rings: RateLimit,
    grants: Grants,
    /// Device number of the mount. None until the mount is there.
    filesystem: OnceLock<u64>,
}

impl Server {
    /// A server that has counted nothing.
    ///
    /// # Errors
    /// When the kernel gives no random numbers.
    pub fn new(registry: Registry) -> io::Result<Server> {
        let (broken_rings, filesystem) = (RateLimit::default(), OnceLock::new());
        Ok(Server { registry, stats: Arc::default(), broken_rings, grants: Grants::new()?, filesystem })
    }

    /// Notes the device number that files on the mount show: descriptors of other files count for
    /// nothing. Until then none does.
    pub fn mounted(&self, filesystem: u64) {
        let set = self.filesystem.set(filesystem);
        assert!(set.is_ok(), "a server has one mount");
    }

    /// What `find` finds of a thread's process, and the access that the process has to a file by
    /// the grant that it claims. None where it has no such grant.
    pub(crate) fn granted<T>(&self, claim: Claim, ino: u64, find: impl Fn() -> Option<(T, Identity)>) -> Option<Shown<T>> {
        let (found, process) = if claim.grant != 0 { find()? } else { return None };
        let access = self.grants.check(claim.grant, process, ino)?;
        Some((found, access, claim.grant))
    }

    /// What `find` finds of a thread's process, the access that the process has to a file by what
    /// it claims, and a grant of that access. None where `find` finds nothing. It may wait for the
    /// process's user: to be called by [`Server::take_in`].
    ///
    /// The descriptor is looked at before `find` is asked whose the thread is: should the id be
    /// another process's by then, which has such a descriptor, that process has to own what is
    /// found as well.
    pub(crate) fn show<T>(
        &self,
        thread: u32,
        claim: Claim,
        ino: u64,
        find: impl Fn() -> Option<(T, Identity)>,
    ) -> Result<Option<Shown<T>>, Reason> {
        if let Some(shown) = self.granted(claim, ino, &find) {
            return Ok(Some(shown));
        }
        let filesystem = *self.filesystem.get().ok_or(Reason::DescriptorHidden)?;
        let access = access::of_thread(thread, claim.descriptor, FileId { filesystem, ino })?;
        Ok(find().map(|(found, process)| (found, access, self.grants.give(process, ino, access))))
    }

    /// `GRANT`, which comes by socket.
    pub(crate) fn grant_received(&self, process: &Process, fd: &Foreign, request: &Grant) -> Reply {
        let shown = self.filesystem.get().ok_or(Reason::DescriptorHidden).and_then(|filesystem| fd.shows(*filesystem));
        self.stats.call(Command::Grant, shown.is_err());
        match shown {
            Ok((ino, access)) => {
                Reply::new(0, &Grant { grant: self.grants.give(process.identity(), ino, access), ..request.clone() })
            }
            Err(reason) => Reply::new(RegistryError::Refused(reason).errno(), request),
        }
    }

    /// `REGISTER` by ioctl, whose caller must not have been answered. It maps and pins: not for the
    /// thread that all clients wait for.
    pub fn register(&self, caller: Caller, request: &Register) -> Reply {
        self.registered(request, self.registry.register(caller, request))
    }

    /// `REGISTER` by socket.
    pub(crate) fn register_received(&self, client: Client, fd: Foreign, request: &Register) -> Reply {
        self.registered(request, self.registry.adopt(client, fd, request))
    }

    /// As [`Server::register`], on a thread of which the user has a quota.
    pub fn register_soon(self: &Arc<Self>, caller: Caller, request: Register, done: impl FnOnce(Reply) + Send + 'static) {
        let server = self.clone();
        self.take_in(caller.user, move |may| {
            done(match may {
                Ok(()) => server.register(caller, &request),
                Err(refusal) => server.registered(&request, Err(refusal)),
            });
        });
    }

    /// Calls `task` on a thread that may wait for a user's processes; here and at once, with an
    /// error, where the user has used up the quota of such threads.
    pub fn take_in(&self, user: u32, task: impl FnOnce(Result<(), RegistryError>) + Send + 'static) {
        self.registry.intake().run(user, |turn| match turn {
            Turn::Taken => task(Ok(())),
            Turn::Refused => task(Err(RegistryError::Refused(Reason::UserLimit))),
        });
    }

    fn registered(&self, request: &Register, result: Result<Arc<Buffer>, RegistryError>) -> Reply {
        self.stats.call(Command::Register, result.is_err());
        match result {
            Ok(buffer) => {
                let (route, reason) = (buffer.route.code(), buffer.reason.code());
                Reply::new(0, &Register { buffer: buffer.id, route, reason, ..request.clone() })
            }
            Err(error) => {
                tracing::debug!(%error, "REGISTER refused");
                let refusal = Register { buffer: 0, route: Route::None.code(), reason: error.reason().code(), ..request.clone() };
                Reply::new(error.errno(), &refusal)
            }
        }
    }

    /// `UNREGISTER`. `thread` is the caller's, which must not have been answered.
    pub fn unregister(&self, thread: u32, request: &Unregister) -> Reply {
        self.unregistered(request, self.registry.unregister(thread, request.buffer))
    }

    /// `UNREGISTER` by socket.
    pub(crate) fn unregister_of(&self, process: &Process, request: &Unregister) -> Reply {
        self.unregistered(request, self.registry.unregister_of(process, request.buffer))
    }

    fn unregistered(&self, request: &Unregister, result: Result<(), RegistryError>) -> Reply {
        self.stats.call(Command::Unregister, result.is_err());
        match result {
            Ok(()) => Reply::new(0, request),
            Err(error) => Reply::new(error.errno(), request),
        }
    }

    /// `STATS`.
    pub fn stats(&self) -> Reply {
        self.stats.call(Command::Stats, false);
        Reply::new(0, &self.stats.snapshot(self.registry.usage()))
    }

    /// `READ` or `WRITE` by ioctl on the file of an inode, whose caller must not have been
    /// answered: it identifies the descriptor, the buffer, the process and the limits. `file` makes
    /// the file, open for the access that the caller has shown: here by a grant, else by a thread
    /// of which the user has a quota. That submits nothing, for it may be stuck next, and what the
    /// kernel has for the thread that submitted would be stuck with it: `go_on` runs the rest
    /// elsewhere.
    pub fn transfer<F: OpenFile>(
        self: &Arc<Self>,
        caller: Caller,
        (direction, request, claim): (Direction, TransferRequest, Claim),
        ino: u64,
        file: impl FnOnce(Access) -> F + Send + 'static,
        go_on: impl FnOnce(Task) + Send + 'static,
        done: impl FnOnce(Reply) + Send + 'static,
    ) {
        let buffer = request.buffer;
        let find = move |server: &Server| server.registry.lookup_with_owner(caller.thread, buffer).ok();
        let transfer = (direction, request, claim);
        if let Some(shown) = self.granted(claim, ino, || find(self)) {
            return self.transfer_shown(caller, transfer, Ok(Some(shown)), file, done);
        }
        let server = self.clone();
        self.take_in(caller.user, move |may| {
            let may = may.map_err(|refusal| refusal.reason());
            let shown = may.and_then(|()| server.show(caller.thread, claim, ino, || find(&server)));
            go_on(Box::new(move || server.transfer_shown(caller, transfer, shown, file, done)));
        });
    }

    fn transfer_shown<F: OpenFile>(
        &self,
        caller: Caller,
        (direction, request, claim): (Direction, TransferRequest, Claim),
        shown: Result<Option<Shown<Arc<Buffer>>>, Reason>,
        file: impl FnOnce(Access) -> F,
        done: impl FnOnce(Reply) + Send + 'static,
    ) {
        let grant = shown.as_ref().ok().and_then(Option::as_ref).map_or(0, |(.., grant)| *grant);
        let requester = Box::new(Ioctl { caller, claim: Claim { grant, ..claim }, done });
        let asked = Asked { stats: self.stats.clone(), direction, request, requester, is_writing_permitted: None };
        let refusal = match shown {
            Ok(Some((buffer, access, _))) => return asked.admit(&file(access), || Ok(buffer)),
            Ok(None) => Reason::NoSuchBuffer,
            Err(reason) => reason,
        };
        asked.refuse(RegistryError::Refused(refusal).errno(), refusal, None);
    }
}

/// The caller of an ioctl, who waits for its answer.
struct Ioctl<F> {
    caller: Caller,
    /// What it gets back: its descriptor, and a grant for the next time.
    claim: Claim,
    done: F,
}

impl<F: FnOnce(Reply) + Send> Requester for Ioctl<F> {
    fn user(&self) -> u32 {
        self.caller.user
    }

    fn process(&self) -> u32 {
        calling_thread::process_of(self.caller.thread)
    }

    fn file_size_limit(&self) -> u64 {
        calling_thread::file_size_limit(self.caller.thread)
    }

    fn is_ring(&self) -> bool {
        false
    }

    fn answer(self: Box<Self>, answer: Answer) {
        let Claim { descriptor, grant } = self.claim;
        (self.done)(Reply::new(answer.errno, &abi::Transfer { descriptor, grant, ..answer.transfer }));
    }
}

/// The answer to an argument that [`abi::decode`] refused.
impl From<abi::DecodeError> for Reply {
    fn from(error: abi::DecodeError) -> Self {
        tracing::debug!(%error, "ioctl refused");
        Reply::error(error.errno())
    }
}
