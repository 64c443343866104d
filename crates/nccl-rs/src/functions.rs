//! The functions of the library: which there must be, which came later, and since when.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::{
    error::Error,
    sys::{Comm, Config, Stream, UniqueId, WaitSignalDesc, Window},
    version::Version,
};

/// A function that older libraries lack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Newer<F> {
    function: Option<F>,
    symbol: &'static str,
    since: Version,
}

impl<F: Copy> Newer<F> {
    pub(crate) const fn is_there(&self) -> bool {
        self.function.is_some()
    }

    /// The function and its name.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] if the library has none.
    pub(crate) fn or_too_old(&self, has: Version) -> Result<(&'static str, F), Error> {
        let too_old = Error::TooOld { what: self.symbol, needs: self.since, has };
        self.function.map(|function| (self.symbol, function)).ok_or(too_old)
    }
}

macro_rules! functions {
    (
        all: { $($name:ident = $symbol:literal($($type:ty),*) -> $result:ty;)* }
        newer: { $($new:ident = $new_symbol:literal since ($major:literal, $minor:literal) ($($new_type:ty),*);)* }
    ) => {
        /// Addresses of functions in a library that is loaded for as long as they are used.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> $result,)*
            $(pub(crate) $new: Newer<unsafe extern "C" fn($($new_type),*) -> c_int>,)*
        }

        impl Functions {
            /// Finds them.
            ///
            /// # Errors
            ///
            /// The name of one that has to be there and is not.
            #[expect(unsafe_code, reason = "gives functions of a library their types")]
            pub(crate) fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: `nccl.h` declares the symbol so, in every version.
                    $($name: *unsafe { library.get($symbol) }.map_err(|_| $symbol)?,)*
                    $($new: Newer {
                        // SAFETY: `nccl.h` declares the symbol so, in every version that has it.
                        function: unsafe { library.get($new_symbol) }.ok().map(|symbol| *symbol),
                        symbol: $new_symbol,
                        since: Version::new($major, $minor, 0),
                    },)*
                })
            }

            /// Functions that came later: name, first version, and whether they are here.
            pub(crate) fn newer(&self) -> Vec<(&'static str, Version, bool)> {
                vec![$((self.$new.symbol, self.$new.since, self.$new.is_there()),)*]
            }
        }
    };
}

functions! {
    all: {
        get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> c_int;
        init_rank_config = "ncclCommInitRankConfig"(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
        finalize = "ncclCommFinalize"(Comm) -> c_int;
        destroy = "ncclCommDestroy"(Comm) -> c_int;
        abort = "ncclCommAbort"(Comm) -> c_int;
        split = "ncclCommSplit"(Comm, c_int, c_int, *mut Comm, *mut Config) -> c_int;
        error_string = "ncclGetErrorString"(c_int) -> *const c_char;
        last_error = "ncclGetLastError"(Comm) -> *const c_char;
        async_error = "ncclCommGetAsyncError"(Comm, *mut c_int) -> c_int;
        rank = "ncclCommUserRank"(Comm, *mut c_int) -> c_int;
        count = "ncclCommCount"(Comm, *mut c_int) -> c_int;
        device = "ncclCommCuDevice"(Comm, *mut c_int) -> c_int;
        create_premul_sum = "ncclRedOpCreatePreMulSum"(*mut c_int, *mut c_void, c_int, c_int, Comm) -> c_int;
        destroy_op = "ncclRedOpDestroy"(c_int, Comm) -> c_int;
        reduce = "ncclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream) -> c_int;
        broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        reduce_scatter =
            "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
        send = "ncclSend"(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        recv = "ncclRecv"(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        group_start = "ncclGroupStart"() -> c_int;
        group_end = "ncclGroupEnd"() -> c_int;
    }
    newer: {
        mem_alloc = "ncclMemAlloc" since (2, 19) (*mut *mut c_void, usize);
        mem_free = "ncclMemFree" since (2, 19) (*mut c_void);
        register = "ncclCommRegister" since (2, 19) (Comm, *mut c_void, usize, *mut *mut c_void);
        deregister = "ncclCommDeregister" since (2, 19) (Comm, *mut c_void);
        shrink = "ncclCommShrink" since (2, 27) (Comm, *mut c_int, c_int, *mut Comm, *mut Config, c_int);
        window_register = "ncclCommWindowRegister" since (2, 27) (Comm, *mut c_void, usize, *mut Window, c_int);
        window_deregister = "ncclCommWindowDeregister" since (2, 27) (Comm, Window);
        all_to_all = "ncclAlltoAll" since (2, 28) (*const c_void, *mut c_void, usize, c_int, Comm, Stream);
        gather = "ncclGather" since (2, 28) (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
        scatter = "ncclScatter" since (2, 28) (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
        revoke = "ncclCommRevoke" since (2, 28) (Comm, c_int);
        grow_id = "ncclCommGetUniqueId" since (2, 29) (Comm, *mut UniqueId);
        grow = "ncclCommGrow" since (2, 29) (Comm, c_int, *const UniqueId, c_int, *mut Comm, *mut Config);
        suspend = "ncclCommSuspend" since (2, 29) (Comm, c_int);
        resume = "ncclCommResume" since (2, 29) (Comm);
        memory_stat = "ncclCommMemStats" since (2, 29) (Comm, c_int, *mut u64);
        put_signal = "ncclPutSignal" since (2, 29)
            (*const c_void, usize, c_int, c_int, Window, usize, c_int, c_int, c_uint, Comm, Stream);
        signal = "ncclSignal" since (2, 29) (c_int, c_int, c_int, c_uint, Comm, Stream);
        wait_signal = "ncclWaitSignal" since (2, 29) (c_int, *mut WaitSignalDesc, Comm, Stream);
    }
}
