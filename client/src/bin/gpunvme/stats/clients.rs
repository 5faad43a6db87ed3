//! The clients of the listener: a thread serves each, and no more of them than there is room for.
//! Where there is none, the one goes that has been there for longest without asking for anything.

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Clients that are served at once.
const CLIENTS: usize = 64;

/// A connected stream.
pub struct Client(OwnedFd);

impl Client {
    /// Takes what comes next, within some time.
    pub fn receive(&self, part: &mut [u8], patience: Duration) -> io::Result<usize> {
        set_socket_timeout(&self.0, Timeout::Recv, Some(patience))?;
        let (count, _) = recv(&self.0, part, RecvFlags::empty())?;
        Ok(count)
    }

    /// Sends some of this, within some time.
    pub fn send(&self, part: &[u8], patience: Duration) -> io::Result<usize> {
        set_socket_timeout(&self.0, Timeout::Send, Some(patience))?;
        Ok(send(&self.0, part, SendFlags::NOSIGNAL)?)
    }
}

/// All clients that there are.
#[derive(Default)]
pub struct Clients {
    held: Mutex<Held>,
    gone: Condvar,
}

#[derive(Default)]
struct Held {
    count: usize,
    /// Those that have not asked yet, oldest first.
    idle: VecDeque<Arc<Client>>,
}

/// One of the clients. Dropping it makes room for another.
pub struct Admitted<'a> {
    clients: &'a Clients,
    client: Arc<Client>,
}

impl Clients {
    /// Takes a client in, when there is room.
    pub fn admit(&self, socket: OwnedFd) -> Admitted<'_> {
        let client = Arc::new(Client(socket));
        let mut held = self.lock();
        while held.count >= CLIENTS {
            if let Some(oldest) = held.idle.pop_front() {
                // Its thread gets the end. It may have come before.
                let _ = shutdown(&oldest.0, Shutdown::Both);
            }
            held = self.gone.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.count += 1;
        held.idle.push_back(client.clone());
        Admitted { clients: self, client }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admitted<'_> {
    /// Notes that it has asked for something, and is kept.
    pub fn has_asked(&self) {
        self.clients.lock().idle.retain(|idle| !Arc::ptr_eq(idle, &self.client));
    }
}

impl std::ops::Deref for Admitted<'_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.has_asked();
        self.clients.lock().count -= 1;
        self.clients.gone.notify_one();
    }
}
