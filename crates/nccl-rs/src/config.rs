//! How a communicator is to be.

use std::{
    ffi::{CString, c_int},
    time::Duration,
};

use crate::{error::Error, sys, version::Version};

/// How a communicator works; what is not set is the library's choice.
///
/// ```
/// # use nccl_rs::CommunicatorConfig;
/// let config = CommunicatorConfig::new().name("tensor parallel").max_ctas(8);
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct CommunicatorConfig {
    pub(crate) blocking: bool,
    pub(crate) patience: Duration,
    settings: Vec<(Setting, c_int)>,
    net_name: Option<String>,
    name: Option<String>,
}

/// A number in `ncclConfig_t`.
#[derive(Debug, Clone, Copy)]
struct Setting {
    name: &'static str,
    since: Version,
    field: fn(&mut sys::Config) -> &mut c_int,
}

/// How long calls that do not block are waited for, unless said.
const PATIENCE: Duration = Duration::from_secs(60);

impl Default for CommunicatorConfig {
    fn default() -> Self {
        Self::new()
    }
}

macro_rules! settings {
    ($($(#[$doc:meta])* $method:ident($argument:ident: $type:ty) = $field:ident since ($major:literal, $minor:literal $(, $patch:literal)?);)*) => {
        impl CommunicatorConfig {
            $(
                $(#[$doc])*
                #[doc = ""]
                #[doc = concat!("NCCL ", stringify!($major), ".", stringify!($minor) $(, ".", stringify!($patch))?, " or newer; older ones refuse it.")]
                pub fn $method(self, $argument: $type) -> Self {
                    let (name, since) = (stringify!($method), Version::new($major, $minor, 0 $(+ $patch)?));
                    self.with(Setting { name, since, field: |config| &mut config.$field }, $argument.into())
                }
            )*
        }
    };
}

settings! {
    /// Thread-block clusters of this many blocks, 0 to 8 (`cgaClusterSize`).
    cga_cluster_size(blocks: u8) = cga_cluster_size since (2, 17);
    /// At least this many thread blocks for each operation (`minCTAs`).
    min_ctas(blocks: u8) = min_ctas since (2, 17);
    /// At most this many thread blocks for each operation (`maxCTAs`).
    max_ctas(blocks: u8) = max_ctas since (2, 17);
    /// Whether communicators split from this one share its resources (`splitShare`).
    split_share(shared: bool) = split_share since (2, 18);
    /// The class of its network traffic (`trafficClass`).
    traffic_class(class: u8) = traffic_class since (2, 25);
    /// Whether switches that reduce are used (`collnetEnable`).
    collnet(enabled: bool) = collnet_enable since (2, 27);
    /// What thread blocks are saved for (`CTAPolicy`): 0 speed, 1 efficiency, 2 none where copy engines can do the work.
    cta_policy(policy: u8) = cta_policy since (2, 27);
    /// Whether communicators shrunk from this one share its resources (`shrinkShare`).
    shrink_share(shared: bool) = shrink_share since (2, 27);
    /// Thread blocks for operations with NVLink SHARP (`nvlsCTAs`).
    nvls_ctas(blocks: u8) = nvls_ctas since (2, 27);
    /// Channels with each peer over the network (`nChannelsPerNetPeer`).
    channels_per_net_peer(channels: u8) = channels_per_net_peer since (2, 28);
    /// Whether operations are scheduled for NVLink first (`nvlinkCentricSched`).
    nvlink_centric_sched(enabled: bool) = nvlink_centric_sched since (2, 28);
    /// How graphs are used (`graphUsageMode`): 0 not at all, 1 one graph, 2 several or beside other work.
    graph_usage_mode(mode: u8) = graph_usage_mode since (2, 29);
    /// Contexts of one-sided operations (`numRmaCtx`), for calls made with [`crate::Communicator::as_raw`]: those here
    /// use the first.
    rma_contexts(contexts: u8) = rma_contexts since (2, 29);
    /// At most this many peers of sends and receives (`maxP2pPeers`).
    max_p2p_peers(peers: u16) = max_p2p_peers since (2, 30);
    /// Whether the replays of one graph are kept in order with the stream's work (`graphStreamOrdering`).
    graph_stream_ordering(ordered: bool) = graph_stream_ordering since (2, 30, 5);
    /// Whether launches on one device are ordered by the host's calls (`launchOrderImplicit`).
    launch_order_implicit(ordered: bool) = launch_order_implicit since (2, 31);
}

impl CommunicatorConfig {
    /// A communicator that does not block.
    pub const fn new() -> Self {
        Self { blocking: false, patience: PATIENCE, settings: Vec::new(), net_name: None, name: None }
    }

    /// Whether the library's calls block until they are done.
    ///
    /// Not blocking is the default: every call of this crate then ends within [`Self::patience`], and a communicator
    /// can be aborted at any time. Blocking makes collectives cheaper for the host, since the library starts them from
    /// the calling thread; one that has to connect first may wait for its peers for as long as they take.
    pub const fn blocking(mut self, blocking: bool) -> Self {
        self.blocking = blocking;
        self
    }

    /// How long a call that is under way in the library is waited for before it is [`Error::TimedOut`]; a minute
    /// unless it is said.
    pub const fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The network plugin, by name (`netName`).
    pub fn net_name(mut self, name: impl Into<String>) -> Self {
        self.net_name = Some(name.into());
        self
    }

    /// What logs call the communicator (`commName`); NCCL 2.27 or newer.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    fn with(mut self, setting: Setting, value: c_int) -> Self {
        self.settings.retain(|(known, _)| known.name != setting.name);
        self.settings.push((setting, value));
        self
    }

    /// The library's form of it.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] for a setting that the library would pass over in silence.
    pub(crate) fn prepare(&self, has: Version) -> Result<Prepared, Error> {
        let check = |what, needs| {
            if has < needs { Err(Error::TooOld { what, needs, has }) } else { Ok(()) }
        };
        let mut prepared = Prepared::default();
        prepared.raw.blocking = self.blocking.into();
        for (setting, value) in &self.settings {
            check(setting.name, setting.since)?;
            *(setting.field)(&mut prepared.raw) = *value;
        }
        if let Some(name) = &self.net_name {
            let text = text("the network's name", name)?;
            prepared.raw.net_name = text.as_ptr();
            prepared.texts.push(text);
        }
        if let Some(name) = &self.name {
            check("the communicator's name", Version::new(2, 27, 0))?;
            let text = text("the communicator's name", name)?;
            prepared.raw.comm_name = text.as_ptr();
            prepared.texts.push(text);
        }
        Ok(prepared)
    }
}

fn text(what: &str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::Invalid { what: format!("{what} holds a zero byte") })
}

/// A configuration as the library reads it, with the texts that it points to.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) raw: sys::Config,
    texts: Vec<CString>,
}

// SAFETY: it points to its own texts alone, which move with it on the heap and are not changed.
#[expect(unsafe_code, reason = "holds addresses of its own")]
unsafe impl Send for Prepared {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_reach_their_fields_and_the_last_one_counts() {
        let config = CommunicatorConfig::new().max_ctas(4).max_ctas(8).blocking(true).split_share(true);
        let prepared = config.prepare(Version::new(2, 18, 0)).unwrap();
        let raw = &prepared.raw;
        assert_eq!((raw.max_ctas, raw.blocking, raw.split_share), (8, 1, 1));
        assert_eq!((raw.min_ctas, raw.traffic_class), (sys::UNDEFINED, sys::UNDEFINED));
        assert!(raw.comm_name.is_null());
    }

    #[test]
    fn settings_that_came_with_a_repair_need_it() {
        let config = CommunicatorConfig::new().graph_stream_ordering(false);
        assert!(config.prepare(Version::new(2, 30, 4)).is_err());
        assert!(config.prepare(Version::new(2, 30, 5)).is_ok());
    }

    #[test]
    fn what_an_old_library_would_pass_over_is_refused() {
        let check = |config: CommunicatorConfig, minor, is_fine: bool| {
            let prepared = config.prepare(Version::new(2, minor, 0));
            assert_eq!(prepared.is_ok(), is_fine, "{config:?}");
            assert!(is_fine || matches!(prepared, Err(Error::TooOld { .. })));
        };
        check(CommunicatorConfig::new().traffic_class(1), 24, false);
        check(CommunicatorConfig::new().traffic_class(1), 25, true);
        check(CommunicatorConfig::new().name("a"), 26, false);
        check(CommunicatorConfig::new().name("a"), 27, true);
        assert!(CommunicatorConfig::new().net_name("a\0b").prepare(Version::new(2, 27, 0)).is_err());
    }
}
