//! The one error of the core. Each variant carries the data, so that a caller can point at what is wrong.

/// What a plan can be refused for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A count that must be at least one is zero.
    #[error("{what} must be at least 1, but is {value}")]
    NotPositive {
        /// The name of the argument.
        what: &'static str,
        /// What was given.
        value: i64,
    },
}

/// A plan, or why there is none.
pub type Result<T> = std::result::Result<T, Error>;
