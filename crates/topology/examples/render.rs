//! Imports a topology file and writes it in another form: `render FILE svg|dot|matrix|nccl|json`.
#![expect(clippy::print_stdout, reason = "a program speaks to its user")]

use std::{env, error::Error, fs::File};

use warpweft_topology::import::import_reader;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [file, form] = arguments.as_slice() else {
        return Err("usage: render FILE svg|dot|matrix|nccl|json".into());
    };
    let topology = import_reader(File::open(file)?)?.topology;
    print!(
        "{}",
        match form.as_str() {
            "svg" => topology.to_svg(),
            "dot" => topology.to_dot(),
            "matrix" => topology.to_matrix(),
            "nccl" => topology.to_nccl_xml(),
            "json" => topology.to_json(),
            other => return Err(format!("{other} is not a form").into()),
        }
    );
    Ok(())
}
