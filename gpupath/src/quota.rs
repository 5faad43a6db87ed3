//! A user's quota: the most that one user may hold of a limited resource.

/// The user who administers the machine.
pub(crate) const ROOT: u32 = 0;

/// The most that a user may have of a resource of which there is `total`, where all others together
/// have `others`.
///
/// An eighth is root's alone. Of the rest a user may have half of what the others left: one alone
/// gets far, and however many came before, there is something left for the next.
pub fn quota(user: u32, total: u64, others: u64) -> u64 {
    let left = |total: u64| total.saturating_sub(others);
    if user == ROOT { left(total) } else { left(total - total / 8).div_ceil(2) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_takes_all_that_may_be_had_leaves_as_much_to_the_next_and_an_eighth_to_root() {
        assert_eq!(quota(1000, 800, 0), 350);
        assert_eq!(quota(1001, 800, 350), 175);
        assert_eq!(quota(1002, 800, 350 + 175), 88);
        let mut others = 0;
        for user in 1000.. {
            match quota(user, 800, others) {
                0 => break,
                quota => others += quota,
            }
        }
        assert_eq!(others, 700);
        assert_eq!(quota(ROOT, 800, others), 100);
    }
}
