//! A fair queue: users take turns, and the processes of each user do, so that a process with many
//! tasks waits for itself. Tasks of one process keep the order in which they came.

use std::collections::VecDeque;

/// The user and process that a task is done for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub user: u32,
    pub process: u32,
}

/// A queue that takes turns.
pub(crate) struct Turns<T> {
    users: VecDeque<Group<Group<T>>>,
    len: usize,
}

/// Waiting tasks of one user, or of one of its processes.
struct Group<T> {
    of: u32,
    waiting: VecDeque<T>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Turns { users: VecDeque::new(), len: 0 }
    }
}

impl<T> Turns<T> {
    /// Number of waiting tasks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no task waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a task.
    pub fn push(&mut self, owner: Owner, item: T) {
        let user = group(&mut self.users, owner.user);
        group(&mut user.waiting, owner.process).waiting.push_back(item);
        self.len += 1;
    }

    /// Takes the next task.
    pub fn pop(&mut self) -> Option<T> {
        self.pop_of(|_| true).map(|(_, item)| item)
    }

    /// Takes the next task of a user who may have one done now, and tells the user. The others keep
    /// their turns.
    pub fn pop_of(&mut self, may: impl Fn(u32) -> bool) -> Option<(u32, T)> {
        let at = self.users.iter().position(|user| may(user.of))?;
        let mut user = self.users.remove(at).expect("found above");
        let mut process = user.waiting.pop_front().expect("a user that is here has something");
        let item = process.waiting.pop_front().expect("a process that is here has something");
        if !process.waiting.is_empty() {
            user.waiting.push_back(process);
        }
        let of = user.of;
        if !user.waiting.is_empty() {
            self.users.push_back(user);
        }
        self.len -= 1;
        Some((of, item))
    }

    /// Drops all tasks.
    pub fn clear(&mut self) {
        *self = Turns::default();
    }
}

/// The group of this number, which is the last where there was none.
fn group<T>(groups: &mut VecDeque<Group<T>>, of: u32) -> &mut Group<T> {
    let at = groups.iter().position(|group| group.of == of).unwrap_or_else(|| {
        groups.push_back(Group { of, waiting: VecDeque::new() });
        groups.len() - 1
    });
    &mut groups[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twenty processes of one user, one of another, and one that asks for little.
    #[test]
    fn users_take_turns_and_then_their_processes() {
        let mut turns = Turns::default();
        for round in 0..3 {
            for process in 0..20 {
                turns.push(Owner { user: 1, process }, (1, process, round));
            }
            turns.push(Owner { user: 2, process: 7 }, (2, 7, round));
        }
        let order: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(order.len(), 63);
        assert!(turns.is_empty());
        assert_eq!(order[..6], [(1, 0, 0), (2, 7, 0), (1, 1, 0), (2, 7, 1), (1, 2, 0), (2, 7, 2)]);
        let of_one: Vec<_> = order.iter().filter(|(user, ..)| *user == 1).collect();
        assert!(of_one.iter().enumerate().all(|(at, (_, process, round))| (*process, *round) == (at as u32 % 20, at / 20)));
    }

    #[test]
    fn one_who_may_not_have_more_keeps_the_next_turn() {
        let mut turns = Turns::default();
        [1, 1, 2, 2].into_iter().enumerate().for_each(|(at, user)| turns.push(Owner { user, process: 7 }, at));
        assert_eq!(turns.pop_of(|user| user != 1), Some((2, 2)));
        assert_eq!(turns.pop_of(|_| false), None);
        assert_eq!([turns.pop(), turns.pop(), turns.pop(), turns.pop()], [Some(0), Some(3), Some(1), None]);
    }

    #[test]
    fn one_who_comes_later_waits_for_one_turn() {
        let mut turns = Turns::default();
        (0..1000).for_each(|number| turns.push(Owner { user: 1, process: 1 }, number));
        turns.pop();
        turns.push(Owner { user: 1, process: 2 }, 5000);
        turns.pop();
        assert_eq!((turns.pop(), turns.len()), (Some(5000), 998));
    }
}
