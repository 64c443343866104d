//! Imports a topology file and prints what it says as JSON.
//!
//! `import topo --import FILE --json`: exit status 2 and a message on standard error if the file is refused.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program speaks to its user")]

use std::{env, error::Error, fs::File, process::ExitCode};

use warpweft_topology::import::{Report, import_reader};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [.., flag, file, output] = arguments.as_slice() else {
        return refuse(&"usage: import topo --import FILE --json");
    };
    if flag != "--import" || output != "--json" {
        return refuse(&"usage: import topo --import FILE --json");
    }
    match read(file) {
        Ok(report) => {
            println!("{}", serde_json::to_string(&report).expect("numbers are finite and keys are text"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            let mut causes = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                causes.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            refuse(&format!("{file}: {causes}"))
        }
    }
}

fn read(file: &str) -> Result<Report, Box<dyn Error>> {
    Ok(import_reader(File::open(file)?)?.report)
}

fn refuse(message: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("{message}");
    ExitCode::from(2)
}
