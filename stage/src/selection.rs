//! Which objects of a set a run brings in: those that match its patterns, and of these the share of
//! a rank.

use crate::error::Result;
use crate::names;
use crate::store::Object;
use gpunvme_programs::sets::Share;

/// What is asked for.
pub struct Selection {
    /// Patterns of names; none stands for all.
    pub include: Vec<String>,
    pub share: Option<Share>,
}

/// A set's objects, sorted by name.
pub struct Selected {
    /// What this run brings in.
    pub objects: Vec<Object>,
    /// What a run that asks for more would.
    pub others: Vec<Object>,
}

impl Selection {
    /// Chooses among the objects of a set, sorted by name.
    ///
    /// # Errors
    /// [`crate::error::Error::Name`] where one that matches may be no file here.
    pub fn of(&self, listed: Vec<Object>) -> Result<Selected> {
        let matches = |name: &str| self.include.is_empty() || self.include.iter().any(|pattern| names::matches(pattern, name));
        let (matching, mut others): (Vec<_>, Vec<_>) = listed.into_iter().partition(|object| matches(&object.name));
        for object in &matching {
            names::check(&object.name)?;
        }
        names::check_together(matching.iter().map(|object| object.name.as_str()))?;
        let Some(share) = self.share else { return Ok(Selected { objects: matching, others }) };
        let mut objects = Vec::new();
        for (at, object) in matching.into_iter().enumerate() {
            let is_of_this_rank = at % share.of == share.index;
            if is_of_this_rank { objects.push(object) } else { others.push(object) }
        }
        Ok(Selected { objects, others })
    }
}

/// Bytes of objects. A store may say any sizes.
pub fn bytes(objects: &[Object]) -> u64 {
    objects.iter().fold(0, |sum, object| sum.saturating_add(object.size))
}
