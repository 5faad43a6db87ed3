//! A list that grows while it is read, without a lock for those who read.
use std::sync::OnceLock;

use crate::mappings::MAX_DEVICES;

/// Items, at most [`MAX_DEVICES`], each of which stays where it is. One thread at a time adds some.
pub(super) struct Growing<T>([OnceLock<T>; MAX_DEVICES]);

impl<T> Growing<T> {
    /// A list with one item.
    pub fn of(first: T) -> Growing<T> {
        let list = Growing(Default::default());
        list.push(first);
        list
    }

    /// Adds an item behind the others.
    ///
    /// # Panics
    /// Where there is no room for it.
    pub fn push(&self, item: T) {
        let free = self.0.iter().find(|slot| slot.get().is_none()).expect("there is room for it");
        assert!(free.set(item).is_ok(), "one thread at a time adds items");
    }

    /// The items there are by now.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map_while(OnceLock::get)
    }

    /// The item of that number.
    pub fn get(&self, number: usize) -> Option<&T> {
        self.0.get(number)?.get()
    }

    /// The one that was added last.
    pub fn last(&self) -> &T {
        self.iter().last().expect("it was made with one")
    }
}

impl<T> FromIterator<T> for Growing<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Growing<T> {
        let list = Growing(Default::default());
        items.into_iter().for_each(|item| list.push(item));
        list
    }
}
