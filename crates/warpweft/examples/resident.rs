//! A kernel that stays on its device and serves the host, parked in between:
//! `cargo run -p warpweft --example resident`

use std::time::{Duration, Instant};

use warpweft::{
    Arg, BufferDesc, BufferView, Deadline, Features, HostFunction, KernelCode, KernelContract, Launch, Param,
    Progress, ResidentDesc, Runtime, Workgroup, host::HostBackend,
};

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::builder()
        .backend(HostBackend::with_devices(1)?)
        .require(Features::RESIDENT_KERNELS)
        .build()?;
    let device = &runtime.devices()[0];
    let word = || Ok::<_, warpweft::Error>(BufferView::whole(device.allocate(&BufferDesc::host_visible(4))?));
    let (request, answer) = (word()?, word()?);

    // It answers a request with its square. It never waits: without work it says so and is called again.
    let code = KernelCode::new().with_function(
        KernelContract::new("square", [Param::read(4), Param::write(4)]).resident(),
        HostFunction::resident(|workgroup: &Workgroup| {
            let request = workgroup.slice::<u32>(0).get(0);
            workgroup.slice::<u32>(1).set(0, request * request);
            Progress::Idle
        }),
    );
    let kernel = device.load(&code)?.kernel("square")?;
    let args = [Arg::Buffer(&request), Arg::Buffer(&answer)];
    let launch = Launch::new(&kernel, [1; 3], &args)?;
    let family = device.residents().ok_or("this device runs no residents")?;
    let resident = family.launch(&ResidentDesc::new(launch))?;

    let ask = |number: u32| -> Result<u32, Box<dyn std::error::Error>> {
        request.write(&number.to_le_bytes())?;
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut bytes = [0; 4];
        while u32::from_le_bytes(bytes) != number * number {
            if Instant::now() > deadline {
                return Err("no answer".into());
            }
            answer.read(&mut bytes)?;
        }
        Ok(u32::from_le_bytes(bytes))
    };
    let within = || Deadline::within(Duration::from_secs(1));
    println!("12 squared is {}", ask(12)?);
    resident.park(within())?;
    println!("parked after {} slices; its state lies in its buffers", resident.slices());
    resident.resume()?;
    println!("13 squared is {}", ask(13)?);
    resident.stop(within())?;
    Ok(())
}
