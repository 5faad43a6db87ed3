//! Macros that declare the structures of the ABI: their size is asserted, they are bytes, and begin
//! with a version.

macro_rules! wire {
    ($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$field_doc:meta])* $field:ident : $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() <= 8);
    };
}

macro_rules! versioned {
    ($($name:ident),*) => { $(
        impl Default for $name {
            /// This version, and zero everywhere else.
            fn default() -> Self {
                let mut new = <$name as FromZeros>::new_zeroed();
                new.version = VERSION;
                new
            }
        }
    )* };
}

pub(crate) use {versioned, wire};
