//! Threads of which one runs at a time: a thread that waits hands its turn to another that the seed
//! chooses. So a seed always gives the same run, and a thread that waits for something that no
//! thread does is found by counting.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

use parking_lot::Mutex;

use crate::common::Random;

/// It is no thread's turn.
const NOBODY: usize = usize::MAX;
/// Turns after which a thread gets one, whatever the seed says.
const STARVED: u64 = 400;

thread_local! {
    static ME: Cell<usize> = const { Cell::new(NOBODY) };
}

/// How turns are given.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Of ten turns, how many the thread keeps that had the last one.
    pub sticky: u64,
}

/// A schedule of threads.
pub struct Schedule {
    turn: AtomicUsize,
    threads: OnceLock<Vec<Thread>>,
    state: Mutex<Scheduler>,
    abandoned: AtomicBool,
}

struct Scheduler {
    random: Random,
    style: Style,
    turns: u64,
    actors: Vec<Actor>,
}

#[derive(Clone)]
struct Actor {
    alive: bool,
    last: u64,
}

impl Schedule {
    /// A schedule of `count` threads, of which none runs yet.
    pub fn new(seed: u64, count: usize, style: Style) -> Schedule {
        let state = Scheduler { random: Random(seed), style, turns: 0, actors: vec![Actor { alive: true, last: 0 }; count] };
        Schedule {
            turn: AtomicUsize::new(NOBODY),
            threads: OnceLock::new(),
            state: Mutex::new(state),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Lets the first of these threads run; each has called [`Schedule::join`], or will.
    pub fn start(&self, threads: Vec<Thread>) {
        assert!(self.threads.set(threads).is_ok());
        self.hand_to(0);
    }

    /// Makes this thread the one of that number, and waits for its first turn.
    pub fn join(&self, me: usize) {
        ME.set(me);
        self.wait_for_turn(me);
    }

    /// The number of this thread, if it is one of them.
    pub fn me() -> Option<usize> {
        Some(ME.get()).filter(|me| *me != NOBODY)
    }

    /// A number below `limit`.
    pub fn below(&self, limit: u64) -> u64 {
        self.state.lock().random.below(limit)
    }

    /// Turns given so far.
    pub fn turns(&self) -> u64 {
        self.state.lock().turns
    }

    /// Lets others run.
    pub fn pause(&self) {
        let Some(me) = Schedule::me() else { return };
        let next = self.state.lock().next(Some(me)).expect("this one is there");
        if next != me {
            self.hand_to(next);
            self.wait_for_turn(me);
        }
    }

    /// This thread is over. Returns whether it was the last.
    pub fn leave(&self) -> bool {
        let me = Schedule::me().expect("it joined");
        ME.set(NOBODY);
        let mut state = self.state.lock();
        state.actors[me].alive = false;
        let next = state.next(None);
        drop(state);
        next.map(|next| self.hand_to(next)).is_none()
    }

    /// Whether all but this thread are over.
    pub fn is_alone(&self) -> bool {
        self.state.lock().actors.iter().filter(|actor| actor.alive).count() == 1
    }

    /// Stops giving turns: something is wrong, and the other threads stay where they are.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    fn hand_to(&self, next: usize) {
        self.turn.store(next, Ordering::Release);
        self.threads.get().expect("started")[next].unpark();
    }

    fn wait_for_turn(&self, me: usize) {
        while self.turn.load(Ordering::Acquire) != me || self.abandoned.load(Ordering::Acquire) {
            std::thread::park();
        }
    }
}

impl Scheduler {
    fn next(&mut self, me: Option<usize>) -> Option<usize> {
        self.turns += 1;
        let (turns, starved) = (self.turns, self.turns.saturating_sub(STARVED));
        let alive: Vec<usize> = (0..self.actors.len()).filter(|a| self.actors[*a].alive).collect();
        let longest = alive.iter().copied().min_by_key(|a| self.actors[*a].last)?;
        let next = match me {
            _ if self.actors[longest].last < starved => longest,
            Some(me) if self.random.below(10) < self.style.sticky => me,
            _ => alive[self.random.below(alive.len() as u64) as usize],
        };
        self.actors[next].last = turns;
        Some(next)
    }
}
