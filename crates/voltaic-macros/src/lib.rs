//! Derive macros of voltaic.
