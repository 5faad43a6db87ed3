//! How many submissions the rings of each process may have taken in one turn of the thread that
//! serves them: a few, and no more for a user with many processes than for some with one.

use super::groups::{Group, Member};
use smallvec::SmallVec;
use std::sync::Arc;

/// Submissions of a process.
const OF_PROCESS: u32 = 32;
/// Submissions of a user, whose processes share them. Each may have one at least.
const OF_USER: u32 = 128;

/// A turn.
pub(super) struct Turns(SmallVec<[Turn; 8]>);

/// What is left to a process.
struct Turn {
    user: *const Group,
    process: *const Group,
    left: u32,
}

impl Turns {
    /// A turn of the processes of these rings.
    pub fn of<'r>(rings: impl Iterator<Item = &'r Member>) -> Turns {
        let mut turns: SmallVec<[Turn; 8]> = SmallVec::new();
        for Member { user, process } in rings {
            if !turns.iter().any(|turn| turn.process == Arc::as_ptr(process)) {
                turns.push(Turn { user: Arc::as_ptr(user), process: Arc::as_ptr(process), left: 0 });
            }
        }
        for at in 0..turns.len() {
            let processes = turns.iter().filter(|turn| turn.user == turns[at].user).count() as u32;
            turns[at].left = (OF_USER / processes).clamp(1, OF_PROCESS);
        }
        Turns(turns)
    }

    /// What is left to a process that has a ring in this turn.
    pub fn left(&mut self, process: &Arc<Group>) -> &mut u32 {
        let turn = self.0.iter_mut().find(|turn| turn.process == Arc::as_ptr(process));
        &mut turn.expect("the process of each ring has a turn").left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_processes_get_a_user_no_more_than_some() {
        let group = Arc::<Group>::default;
        let (user, other) = (group(), group());
        let members = |user: &Arc<Group>, processes: u32| -> Vec<Member> {
            (0..processes).map(|_| Member { user: user.clone(), process: group() }).collect()
        };
        for (processes, each) in [(1, 32), (4, 32), (8, 16), (100, 1), (200, 1)] {
            let (many, one) = (members(&user, processes), members(&other, 1));
            // Each process has two rings.
            let mut turns = Turns::of(many.iter().chain(&one).chain(&many).chain(&one));
            assert!(many.iter().all(|member| *turns.left(&member.process) == each), "{processes}");
            let left = turns.left(&one[0].process);
            assert_eq!(*left, 32);
            *left -= 30;
            assert_eq!(*turns.left(&one[0].process), 2);
        }
    }
}
