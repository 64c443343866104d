//! Runs one kernel on two devices and adds up what they found: `cargo run -p warpweft --example kernel`

use std::time::Duration;

use warpweft::{
    Arg, BufferDesc, BufferView, HostFunction, KernelCode, KernelContract, Launch, Op, Param, QueueDesc,
    Runtime, SemaphorePoint, Submission, Workgroup, host::HostBackend,
};

/// How many steps a number takes to reach 1 if even ones are halved and odd ones tripled plus one.
fn steps(mut number: u64) -> u32 {
    let mut steps = 0;
    while number != 1 {
        number = if number.is_multiple_of(2) { number / 2 } else { 3 * number + 1 };
        steps += 1;
    }
    steps
}

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const EACH: u32 = 5000;
    let runtime = Runtime::builder().backend(HostBackend::with_devices(2)?).build()?;

    // A kernel says what it does to its arguments; launches are checked against that.
    let contract = KernelContract::new("steps", [Param::write(4), Param::scalar::<u32>()]);
    let code = KernelCode::new().with_function(
        contract,
        HostFunction::new(|workgroup: &Workgroup| {
            let [index, ..] = workgroup.index();
            let number = workgroup.scalar::<u32>(1) + index;
            workgroup.slice::<u32>(0).set(index as usize, steps(number.into()));
        }),
    );

    // Start on every device, then wait: the devices work side by side.
    let mut running = Vec::new();
    for (device, first) in runtime.devices().iter().zip([1, 1 + EACH]) {
        let results = BufferView::whole(device.allocate(&BufferDesc::device(u64::from(EACH) * 4))?);
        let kernel = device.load(&code)?.kernel("steps")?;
        let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
        let first = first.to_le_bytes();
        let args = [Arg::Buffer(&results), Arg::Scalar(&first)];
        let launch = Op::Launch(Launch::new(&kernel, [EACH, 1, 1], &args)?);
        device.create_queue(&QueueDesc::default())?.submit(&Submission {
            waits: &[],
            ops: &[launch],
            signals: std::slice::from_ref(&done),
        })?;
        running.push((results, done));
    }

    let mut longest = 0;
    for (results, done) in running {
        done.wait(Duration::from_secs(10))?;
        let mut bytes = vec![0; EACH as usize * 4];
        runtime.transfer().read(&results, &mut bytes, Duration::from_secs(10))?;
        let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        longest = words.fold(longest, u32::max);
    }
    println!("the longest way down from a number up to {} has {longest} steps", 2 * EACH);
    assert_eq!(longest, (1..=u64::from(2 * EACH)).map(steps).max().unwrap_or(0));
    Ok(())
}
