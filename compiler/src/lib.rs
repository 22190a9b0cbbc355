//! The dcc compiler.
