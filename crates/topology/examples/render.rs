//! Imports a topology file, or discovers the machine of a sysfs folder, and writes it in another form: `render FILE|/sys svg|dot|matrix|nccl|json`.
#![expect(clippy::print_stdout, reason = "a program speaks to its user")]

use std::{env, error::Error, fs::File, path::Path};

use warpweft_topology::{discover, import::import_reader};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [file, form] = arguments.as_slice() else {
        return Err("usage: render FILE|/sys svg|dot|matrix|nccl|json".into());
    };
    let topology = if Path::new(file).is_dir() {
        discover(Path::new(file)).topology
    } else {
        import_reader(File::open(file)?)?.topology
    };
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
