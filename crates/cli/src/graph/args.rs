//! The command line of `warpweft graph`.

use std::{path::PathBuf, time::Duration};

use clap::Args as ClapArgs;

use crate::args::{Links, Selection, parse_seconds};

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
FILE is JSON: how many devices there are, buffers with a name, a size and a placement, and nodes in the order in
which they would be right one by one. Who waits for whom follows from the bytes that they use:

  {\"version\": 1, \"devices\": 2,
   \"buffers\": [{\"name\": \"rows\", \"size\": 4096, \"placement\": {\"device\": 0}},
               {\"name\": \"out\", \"size\": 4096, \"placement\": {\"host_visible\": 1}}],
   \"nodes\": [{\"do\": {\"fill\": {\"dst\": \"rows\", \"byte\": 1}}},
             {\"name\": \"half\", \"do\": {\"copy\": {\"src\": {\"buffer\": \"rows\", \"bytes\": [0, 2048]},
                                           \"dst\": {\"buffer\": \"out\", \"bytes\": [0, 2048]}}}}]}

Placements: {\"device\": N}, {\"host_visible\": N}, {\"shared\": [N, ...]}. Nodes, in words of 32 bits: fill {dst, byte},
copy {src, dst}, the kernels scale {dst, factor}, add {src, dst} and stencil {src, dst}, and the tasks of the host
sum {src, dst} and reverse {src, dst}. A node may also have a name, a device and a lane.

Exit code: 0, or 1 if a run failed or came to other bytes than a serial one, or 2 for a file that is not right.

Examples:
  warpweft graph halo.json                    nodes, edges and why, critical path, segments
  warpweft graph halo.json --svg halo.svg     a picture of them
  warpweft graph halo.json --why 2,half       why node \"half\" waits for node 2
  warpweft graph halo.json --run --replays 10 compare what comes of it with a serial run
  warpweft graph halo.json --run --backend host,cuda")]
pub(crate) struct GraphArgs {
    /// The description.
    pub(crate) file: PathBuf,
    /// Write a graph for Graphviz.
    #[arg(long, value_name = "FILE")]
    pub(crate) dot: Option<PathBuf>,
    /// Write a picture.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Say why one node waits for another; by number or name, the one that comes first first.
    #[arg(long, value_names = ["A,B"], value_delimiter = ',', num_args = 1)]
    pub(crate) why: Vec<String>,
    /// Run it, and compare every byte with what a serial run on the host comes to.
    #[arg(long)]
    pub(crate) run: bool,
    /// Times to run it.
    #[arg(long, value_name = "K", default_value_t = 1, requires = "run", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) replays: u32,
    /// Time for each run.
    #[arg(long, value_name = "SECONDS", default_value = "30", requires = "run", value_parser = parse_seconds)]
    pub(crate) timeout: Duration,
    /// Backends whose devices to use (host, cuda, vulkan), separated by commas.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "host")]
    pub(crate) backend: Vec<String>,
    /// How many host devices to make; as many as the file has unless it is said.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) devices: Option<u32>,
    /// How host devices are linked with each other.
    #[arg(long, value_enum, default_value_t = Links::All)]
    pub(crate) links: Links,
    /// How many devices to make of each Vulkan device.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) copies: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

impl GraphArgs {
    pub(crate) fn selection(&self, devices: u32) -> Selection {
        Selection {
            backend: self.backend.clone(),
            devices: self.devices.unwrap_or(devices),
            links: self.links,
            copies: self.copies,
            impersonate: None,
        }
    }
}
