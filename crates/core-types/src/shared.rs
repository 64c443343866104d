//! The one place where memory that others may be writing is touched from Rust.
//!
//! Buffers are device memory: copy engines, kernels and other threads write them, and a program that
//! forgets to order two operations must get unspecified bytes and nothing worse. So no reference to
//! such memory is ever made, and bytes move by `memcpy` on raw pointers. The functions here are never
//! inlined: their callers see a call, so the compiler cannot read shared bytes a second time in place of
//! the copy it made, and `memcpy` itself does not care what the bytes are. std has no atomic `memcpy` yet
//! (RFC 3301), and a loop of relaxed words was measured at 0.84 of `memcpy` at 64 MiB (see
//! `docs/design/seam.md`).

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

/// A range of shared memory that was checked to lie inside its allocation.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    base: NonNull<u8>,
    len: usize,
}

impl Span {
    /// The `len` bytes at `offset` of an allocation that begins at `base` and is known to hold them.
    pub(crate) fn within(base: NonNull<u8>, offset: usize, len: usize) -> Self {
        // The addition cannot wrap: the caller checked that the allocation holds the range.
        Self { base: base.map_addr(|address| address.saturating_add(offset)), len }
    }
}

/// Copies from shared memory into a slice of the same length.
#[expect(unsafe_code, reason = "shared memory is only reachable through raw pointers")]
#[inline(never)]
pub(crate) fn read(from: Span, into: &mut [u8]) {
    assert_eq!(from.len, into.len(), "spans are made for the slice they meet");
    // SAFETY: `from` lies in a live allocation (`HostMapping::new`'s duty, checked by `Span::within`'s
    // caller); `into` is exclusively ours, so the two cannot overlap.
    unsafe { std::ptr::copy_nonoverlapping(from.base.as_ptr(), into.as_mut_ptr(), into.len()) }
}

/// Copies a slice into shared memory of the same length.
#[expect(unsafe_code, reason = "shared memory is only reachable through raw pointers")]
#[inline(never)]
pub(crate) fn write(from: &[u8], to: Span) {
    assert_eq!(from.len(), to.len, "spans are made for the slice they meet");
    // SAFETY: `to` lies in a live allocation without Rust references (`HostMapping::new`'s duties),
    // so it cannot overlap the borrowed `from`.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.base.as_ptr(), from.len()) }
}

/// One word, with everything its writer wrote before it.
pub(crate) fn load(from: Span) -> u64 {
    // Acquire: it pairs with `store`, and with whatever a device orders by the word.
    word(from).load(Ordering::Acquire)
}

/// Stores one word, behind everything that this thread wrote before.
pub(crate) fn store(to: Span, value: u64) {
    // Release: it pairs with `load`.
    word(to).store(value, Ordering::Release);
}

#[expect(unsafe_code, reason = "shared memory is only reachable through raw pointers")]
fn word<'a>(at: Span) -> &'a AtomicU64 {
    assert!(at.len == 8 && at.base.as_ptr().addr().is_multiple_of(8), "callers checked the place");
    // SAFETY: the word lies in a live allocation without other Rust references (`HostMapping::new`'s duties), is
    // aligned, and the reference does not outlive the call of `load` or `store`.
    unsafe { AtomicU64::from_ptr(at.base.as_ptr().cast()) }
}

/// Copies between two ranges of shared memory of one length.
#[expect(unsafe_code, reason = "shared memory is only reachable through raw pointers")]
#[inline(never)]
pub(crate) fn copy(from: Span, to: Span) {
    assert_eq!(from.len, to.len, "spans are made for each other");
    // SAFETY: both lie in live allocations without Rust references (`HostMapping::new`'s duties); `copy`
    // allows them to overlap.
    unsafe { std::ptr::copy(from.base.as_ptr(), to.base.as_ptr(), from.len) }
}
