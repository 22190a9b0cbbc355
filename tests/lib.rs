//! The test suite lives in `suite/`; this package has no library code.
