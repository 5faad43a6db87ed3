//! Attacks on a mount by users without rights, who speak the raw ABI. Each is a process of its own,
//! begun by the test that watches what it costs others.
//!
//! The modules go by what is attacked. An attack is a function in the table of its module
//! (`attacks!`), which a test begins by name ([`gpunvme_tests::attack`]); what it did to the daemon
//! and to a victim, [`gpunvme_tests::observe`] tells.

mod appends;
mod coherence;
mod fuzz;
mod ownership;
mod registration;
mod rings;
mod stubborn;
mod transfers;
mod victim;
mod waits;

/// Also what [`gpunvme_tests::attack::RunningAttack::begin`] runs, to carry out one of them.
#[test]
fn each_attack_has_a_name_of_its_own() {
    gpunvme_tests::attack::check_or_carry_out(&[
        appends::ATTACKS,
        coherence::ATTACKS,
        fuzz::ATTACKS,
        ownership::ATTACKS,
        registration::ATTACKS,
        rings::ATTACKS,
        transfers::ATTACKS,
        victim::ATTACKS,
        waits::ATTACKS,
    ]);
}
