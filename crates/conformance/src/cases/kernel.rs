//! Loading code and running it.

use std::{path::PathBuf, sync::Arc, time::Instant};

use libtest_mimic::Failed;
use warpweft_core_types::{
    Arg, CodeFormat, Failure, Features, ForeignCode, HostFunction, KernelCode, KernelContract, Launch,
    LaunchError, LoadError, Module, Op, Param, SubmitError, WaitError, WorkId, Workgroup,
};

use crate::{
    context::{Context, MOMENT, PATIENCE},
    harness::{Case, Verdict},
    kernels,
};

pub(super) const CASES: &[Case] = &[
    Case::new("kernel::every_workgroup_runs_once", every_workgroup_runs_once)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .covers(&["Device::load", "Module::kernel", "Kernel::max_workgroups"]),
    Case::new("kernel::runs_in_every_form", runs_in_every_form)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .when(runs_several_forms),
    Case::new("kernel::knows_where_it_comes_from", knows_where_it_comes_from).covers(&[
        "Module::device",
        "Module::format",
        "Kernel::device",
        "Kernel::contract",
    ]),
    Case::new("kernel::reads_and_writes_in_order", reads_and_writes_in_order)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("kernel::reaches_peer_memory", reaches_peer_memory)
        .needs(Features::HOST_VISIBLE_MEMORY.union(Features::PEER_ACCESS))
        .devices(2)
        .when(reads_and_writes_its_peer),
    Case::new("kernel::launches_that_do_not_fit_are_refused", launches_that_do_not_fit_are_refused),
    Case::new("kernel::unknown_names_are_listed", unknown_names_are_listed),
    Case::new("kernel::unknown_forms_are_refused", unknown_forms_are_refused),
    Case::new("kernel::names_must_differ", names_must_differ),
    Case::new("kernel::contracts_beyond_limits_are_refused", contracts_beyond_limits_are_refused),
    Case::new("kernel::a_failure_stays_in_its_queue", a_failure_stays_in_its_queue)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .may_lose_device()
        .covers(&["Queue::failure"]),
    Case::new("kernel::arguments_are_aligned_as_promised", arguments_are_aligned_as_promised)
        .when(runs_functions),
    Case::new("kernel::only_writes_what_its_contract_says", only_writes_what_its_contract_says)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .when(runs_functions),
    Case::new("kernel::a_resident_kernel_is_not_queued", a_resident_kernel_is_not_queued),
    Case::new("kernel::foreign_kernels_are_refused", foreign_kernels_are_refused).devices(2),
    Case::new("kernel::a_wait_ends_by_its_deadline_whatever_the_kernel_does", a_wait_ends_by_its_deadline)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("kernel::runs_from_a_library", runs_from_a_library)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .when(runs_libraries),
    Case::new("kernel::a_library_that_is_not_right_is_named", a_library_that_is_not_right_is_named)
        .when(runs_libraries),
    Case::new("kernel::outlives_its_module", outlives_its_module),
    Case::new("kernel::says_what_it_takes", says_what_it_takes).covers(&["Kernel::resources"]),
    Case::new("kernel::workgroup_memory_has_a_limit", workgroup_memory_has_a_limit)
        .when(limits_workgroup_memory),
];

fn runs_libraries(cx: &Context) -> Result<(), &'static str> {
    let runs = cx.infos[0].code_formats.contains(&CodeFormat::HostLibrary);
    runs.then_some(()).ok_or("the device does not run host libraries")
}

fn reads_and_writes_its_peer(cx: &Context) -> Result<(), &'static str> {
    let access = cx.device(0).peers().map(|family| family.access(cx.infos[1].id));
    let both = access.is_some_and(|access| access.read && access.write);
    both.then_some(()).ok_or("device 0 does not read and write memory of device 1")
}

fn limits_workgroup_memory(cx: &Context) -> Result<(), &'static str> {
    let limits = cx.device(0).limits().shared_bytes < u32::MAX;
    limits.then_some(()).ok_or("workgroups have all memory there is")
}

fn says_what_it_takes(cx: &Context) -> Verdict {
    let resources = cx.kernel(0, &kernels::number())?.resources();
    assert!(resources.workgroups_per_multiprocessor >= 1, "{resources:?}");
    assert!(resources.registers.is_none_or(|registers| (1..=255).contains(&registers)), "{resources:?}");
    assert_eq!((resources.local_bytes, resources.shared_bytes), (0, 0), "it is a simple kernel");
    Ok(())
}

/// The empty kernel with as much workgroup memory.
#[expect(unsafe_code, reason = "changes what the kernel is given")]
fn empty_with(shared_bytes: u32) -> KernelCode {
    // SAFETY: the kernel touches no memory, whatever it is given.
    unsafe { kernels::empty().with_contracts(|contract| contract.with_shared_bytes(shared_bytes)) }
}

/// As much as the limit says is given, a byte more is refused with the figure.
fn workgroup_memory_has_a_limit(cx: &Context) -> Verdict {
    let most = cx.device(0).limits().shared_bytes;
    let kernel = cx.kernel(0, &empty_with(most))?;
    assert_eq!(kernel.resources().shared_bytes, u64::from(most));
    cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [4, 1, 1], &[])?)])?;
    let error = cx.device(0).load(&empty_with(most + 1)).err().ok_or("it was loaded")?;
    assert!(matches!(&error, LoadError::Rejected { log } if log.contains(&most.to_string())), "{error}");
    Ok(())
}

fn every_workgroup_runs_once(cx: &Context) -> Verdict {
    let kernel = cx.kernel(0, &kernels::number())?;
    assert!(kernel.max_workgroups().iter().all(|&most| most >= 7));
    for grid in [[1, 1, 1], [5, 1, 1], [7, 3, 2]] {
        let count: u32 = grid.iter().product();
        let memory = cx.memory(0, u64::from(count) * 4)?;
        let base = 1000_u32.to_le_bytes();
        let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
        cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, grid, &args)?)])?;
        let expected: Vec<u32> = (1000..1000 + count).collect();
        assert_eq!(cx.download_words(0, &memory)?, expected, "{grid:?}");
    }
    Ok(())
}

/// The foreign forms of a kernel that the device says it runs.
fn foreign_forms(cx: &Context, code: &KernelCode) -> Vec<ForeignCode> {
    let runs = |form: &&ForeignCode| cx.infos[0].code_formats.contains(&form.format());
    code.foreign().iter().filter(runs).cloned().collect()
}

fn runs_several_forms(cx: &Context) -> Result<(), &'static str> {
    let forms = foreign_forms(cx, &kernels::number());
    let lacks_compiler = |form| matches!(load_form(cx, form), Err(LoadError::Library { .. }));
    match forms.len() {
        0 | 1 => Err("the device runs one form of this kernel"),
        _ if forms.into_iter().any(lacks_compiler) => Err("there is no compiler for one of the forms"),
        _ => Ok(()),
    }
}

#[expect(unsafe_code, reason = "vouches for the kernel in one of its forms")]
fn load_form(cx: &Context, form: ForeignCode) -> Result<Arc<dyn Module>, LoadError> {
    let contracts = kernels::number().contracts().to_vec();
    // SAFETY: the form is one that the suite's kernel comes in, with the same contract.
    cx.device(0).load(&unsafe { KernelCode::new().with_foreign(contracts, form) })
}

fn runs_in_every_form(cx: &Context) -> Verdict {
    for form in foreign_forms(cx, &kernels::number()) {
        let format = form.format();
        let module = load_form(cx, form)?;
        assert_eq!(module.format(), format);
        let (kernel, memory, base) = (module.kernel("number")?, cx.memory(0, 40)?, 3_u32.to_le_bytes());
        let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
        cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [10, 1, 1], &args)?)])?;
        assert_eq!(cx.download_words(0, &memory)?, (3..13).collect::<Vec<u32>>(), "{format}");
    }
    Ok(())
}

fn knows_where_it_comes_from(cx: &Context) -> Verdict {
    let code = kernels::number();
    let module = cx.device(0).load(&code)?;
    assert_eq!(module.device(), cx.infos[0].id);
    assert!(code.formats().any(|format| format == module.format()), "a form that was offered");
    assert!(cx.infos[0].code_formats.contains(&module.format()), "a form the device says it runs");
    let kernel = module.kernel("number")?;
    assert_eq!((kernel.device(), kernel.contract()), (cx.infos[0].id, &code.contracts()[0]));
    Ok(())
}

fn reads_and_writes_in_order(cx: &Context) -> Verdict {
    let kernel = cx.kernel(0, &kernels::increment())?;
    let words: Vec<u8> = (0..1000_u32).flat_map(u32::to_le_bytes).collect();
    let buffers = [cx.upload(0, &words)?, cx.memory(0, 4000)?];
    let count = 1000_u32.to_le_bytes();
    let forth = [Arg::Buffer(&buffers[1]), Arg::Buffer(&buffers[0]), Arg::Scalar(&count)];
    let back = [Arg::Buffer(&buffers[0]), Arg::Buffer(&buffers[1]), Arg::Scalar(&count)];
    let launches =
        [Launch::new(&kernel, [1; 3], &forth)?, Launch::new(&kernel, [1; 3], &back)?].map(Op::Launch);
    let lane = cx.lane(0)?;
    for _ in 0..10 {
        lane.submit(&[], &launches)?;
    }
    lane.run(&[])?;
    let expected: Vec<u32> = (20..1020).collect();
    assert_eq!(cx.download_words(0, &buffers[0])?, expected);
    Ok(())
}

fn reaches_peer_memory(cx: &Context) -> Verdict {
    let kernel = cx.kernel(0, &kernels::increment())?;
    let words: Vec<u8> = (0..100_u32).flat_map(u32::to_le_bytes).collect();
    let (theirs, results) = (cx.upload(1, &words)?, cx.memory(1, 400)?);
    let count = 100_u32.to_le_bytes();
    let args = [Arg::Buffer(&results), Arg::Buffer(&theirs), Arg::Scalar(&count)];
    cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [1; 3], &args)?)])?;
    let expected: Vec<u32> = (1..101).collect();
    assert_eq!(cx.download_words(1, &results)?, expected);
    Ok(())
}

fn launches_that_do_not_fit_are_refused(cx: &Context) -> Verdict {
    let kernel = cx.kernel(0, &kernels::number())?;
    let (memory, small, four, eight) = (cx.memory(0, 64)?, cx.memory(0, 2)?, [0; 4], [0; 8]);
    let refusal = |grid, args: &[Arg<'_>]| Launch::new(&kernel, grid, args).err().ok_or("it was taken");
    let (buffer, scalar) = (Arg::Buffer(&memory), Arg::Scalar(&four));
    assert!(matches!(refusal([1; 3], &[buffer])?, LaunchError::ArgumentCount { expected: 2, actual: 1, .. }));
    assert!(matches!(refusal([1; 3], &[scalar, buffer])?, LaunchError::ArgumentKind { index: 0, .. }));
    assert!(matches!(
        refusal([1; 3], &[buffer, Arg::Scalar(&eight)])?,
        LaunchError::ArgumentKind { index: 1, .. }
    ));
    assert!(matches!(refusal([1; 3], &[Arg::Buffer(&small), scalar])?, LaunchError::BufferTooSmall { .. }));
    assert!(matches!(refusal([1, 0, 1], &[buffer, scalar])?, LaunchError::Dimensions { .. }));
    let limit = kernel.max_workgroups();
    if let Some(beyond) = limit[2].checked_add(1) {
        assert!(matches!(refusal([1, 1, beyond], &[buffer, scalar])?, LaunchError::Dimensions { .. }));
    }
    let increment = cx.kernel(0, &kernels::increment())?;
    let (low, high) = (memory.slice(0..40)?, memory.slice(36..64)?);
    let aliased = Launch::new(&increment, [1; 3], &[Arg::Buffer(&low), Arg::Buffer(&high), scalar]).err();
    assert!(matches!(aliased, Some(LaunchError::Aliased { first: 0, second: 1, .. })), "{aliased:?}");
    Ok(())
}

fn unknown_names_are_listed(cx: &Context) -> Verdict {
    let error = cx.device(0).load(&kernels::number())?.kernel("letter").err().ok_or("it was found")?;
    let listed = matches!(&error, LoadError::NoSuchKernel { name, available }
        if name == "letter" && available == &["number"]);
    assert!(listed, "{error}");
    Ok(())
}

#[expect(unsafe_code, reason = "foreign code is asserted to keep its contract; this is never run")]
fn foreign(format: CodeFormat) -> KernelCode {
    let code = ForeignCode::Binary { format, bytes: b"not code at all".to_vec() };
    // SAFETY: the bytes are no code in any format, so that nothing can run; the case expects a refusal.
    unsafe { KernelCode::new().with_foreign([KernelContract::new("none", [])], code) }
}

fn unknown_forms_are_refused(cx: &Context) -> Verdict {
    for format in [CodeFormat::Cubin, CodeFormat::SpirV] {
        let error = cx.device(0).load(&foreign(format)).err().ok_or("it was loaded")?;
        let refused = match error {
            LoadError::UnsupportedFormat { device, format: named } => {
                device == cx.infos[0].id && named == format
            }
            // A device that runs this form finds that it is garbage.
            LoadError::Rejected { .. } => cx.infos[0].code_formats.contains(&format),
            _ => false,
        };
        assert!(refused, "{format}");
    }
    assert!(matches!(cx.device(0).load(&KernelCode::new()), Err(LoadError::Rejected { .. })));
    Ok(())
}

fn names_must_differ(cx: &Context) -> Verdict {
    let other = KernelContract::new("number", [Param::read(1)]);
    let nothing = HostFunction::new(|_| {});
    let error =
        cx.device(0).load(&kernels::number().with_function(other, nothing)).err().ok_or("it was loaded")?;
    assert!(matches!(&error, LoadError::DuplicateKernel { name } if name == "number"), "{error}");
    Ok(())
}

fn contracts_beyond_limits_are_refused(cx: &Context) -> Verdict {
    let limits = cx.device(0).limits();
    let wide = [limits.workgroup_threads, 2, 1];
    let nothing = || HostFunction::new(|_| {});
    for contract in [
        KernelContract::new("wide", []).with_workgroup_size(wide),
        KernelContract::new("empty", []).with_workgroup_size([1, 0, 1]),
        KernelContract::new("crooked", [Param::read(1).aligned(3)]),
        KernelContract::new("strict", [Param::read(1).aligned(limits.buffer_alignment * 2)]),
    ] {
        let name = contract.name.clone();
        let error = cx.device(0).load(&KernelCode::new().with_function(contract, nothing())).err();
        let named = matches!(&error, Some(LoadError::Rejected { log }) if log.contains(&name));
        assert!(named, "{name}: {error:?}");
    }
    let many = vec![Param::Scalar { size: limits.scalar_bytes }, Param::scalar::<u8>()];
    for params in [vec![Param::Scalar { size: limits.scalar_bytes + 1 }], many] {
        let code = KernelCode::new().with_function(KernelContract::new("large", params), nothing());
        let error = cx.device(0).load(&code).err().ok_or("it was loaded")?;
        let most = u64::from(limits.scalar_bytes);
        let counted = matches!(
            error,
            LoadError::ScalarsTooLarge { size_bytes, limit_bytes, .. } if (size_bytes, limit_bytes) == (most + 1, most)
        );
        assert!(counted, "{error}");
    }
    Ok(())
}

fn a_failure_stays_in_its_queue(cx: &Context) -> Verdict {
    let (failing, number) = (cx.kernel(0, &kernels::failing())?, cx.kernel(0, &kernels::number())?);
    let memory = cx.memory(0, 64)?;
    let args = [Arg::Buffer(&memory)];
    let launch = [Op::Launch(Launch::new(&failing, [1; 3], &args)?)];
    let lane = cx.lane(0)?;
    let (id, done) = lane.submit(&[], &launch)?;
    // It may have failed already.
    let behind = match lane.submit(&[], &[]) {
        Ok((_, behind)) => Some(behind),
        Err(SubmitError::Failed(_)) => None,
        Err(error) => return Err(error.into()),
    };
    let Err(WaitError::Failed(failure)) = done.wait(PATIENCE) else { return Err("it passed".into()) };
    let named = match &*failure {
        Failure::KernelPanicked { work, kernel, .. } | Failure::KernelFailed { work, kernel, .. } => {
            *work == WorkId::Operation { submission: id, position: 0 } && kernel == "failing"
        }
        // Where a fault loses the device, nothing below can be asked of it.
        Failure::DeviceLost { .. } => return cx.stays_lost(0),
        _ => false,
    };
    assert!(named, "{failure}");
    let fails = behind.is_none_or(|behind| matches!(behind.wait(PATIENCE), Err(WaitError::Failed(_))));
    assert!(fails, "what was behind it fails too");
    assert!(matches!(lane.submit(&[], &[]), Err(SubmitError::Failed(_))), "the queue takes no more");
    assert!(lane.queue.failure().is_some() && cx.device(0).failure().is_none());
    let base = 5_u32.to_le_bytes();
    let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
    cx.lane(0)?.run(&[Op::Launch(Launch::new(&number, [16, 1, 1], &args)?)])?;
    assert_eq!(cx.download_words(0, &memory)?, (5..21).collect::<Vec<u32>>());
    Ok(())
}

fn runs_functions(cx: &Context) -> Result<(), &'static str> {
    let runs = cx.infos[0].code_formats.contains(&CodeFormat::HostFunction);
    runs.then_some(()).ok_or("the device does not run Rust functions")
}

fn arguments_are_aligned_as_promised(cx: &Context) -> Verdict {
    let alignment = cx.device(0).limits().buffer_alignment;
    let contract = KernelContract::new("aligned", [Param::read(4).aligned(alignment)]);
    let body = HostFunction::new(move |workgroup: &Workgroup<'_>| {
        let address = workgroup.slice::<u32>(0).as_ptr().addr() as u64;
        assert!(address.is_multiple_of(alignment), "{address:#x}");
    });
    let kernel = cx.kernel(0, &KernelCode::new().with_function(contract, body))?;
    for size in [64, 4097, 100] {
        let memory = cx.memory(0, size)?;
        cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [1; 3], &[Arg::Buffer(&memory)])?)])?;
        let inner = memory.slice(4..12)?;
        let refused = Launch::new(&kernel, [1; 3], &[Arg::Buffer(&inner)]).err();
        assert!(matches!(refused, Some(LaunchError::Misaligned { offset: 4, .. })), "{refused:?}");
    }
    Ok(())
}

fn only_writes_what_its_contract_says(cx: &Context) -> Verdict {
    let contract = KernelContract::new("sneaky", [Param::read(4)]);
    let body = HostFunction::new(|workgroup: &Workgroup<'_>| workgroup.slice::<u32>(0).set(0, 1));
    let kernel = cx.kernel(0, &KernelCode::new().with_function(contract, body))?;
    let memory = cx.memory(0, 4)?;
    let args = [Arg::Buffer(&memory)];
    let (_, done) = cx.lane(0)?.submit(&[], &[Op::Launch(Launch::new(&kernel, [1; 3], &args)?)])?;
    assert!(matches!(done.wait(PATIENCE), Err(WaitError::Failed(_))));
    assert_eq!(cx.download_words(0, &memory)?, [0]);
    Ok(())
}

fn a_resident_kernel_is_not_queued(cx: &Context) -> Verdict {
    let (kernel, memory) = (cx.kernel(0, &kernels::counter())?, cx.memory(0, 4)?);
    let args = [Arg::Buffer(&memory)];
    let launch = [Op::Launch(Launch::new(&kernel, [1; 3], &args)?)];
    let error = cx.lane(0)?.submit(&[], &launch).err().ok_or("it was taken")?;
    assert!(matches!(&error, SubmitError::Sliced { kernel } if kernel == "counter"), "{error}");
    Ok(())
}

fn foreign_kernels_are_refused(cx: &Context) -> Verdict {
    let kernel = cx.kernel(1, &kernels::empty())?;
    let launch = [Op::Launch(Launch::new(&kernel, [1; 3], &[])?)];
    let error = cx.lane(0)?.submit(&[], &launch).err().ok_or("it was taken")?;
    assert!(
        matches!(error, SubmitError::Foreign { what: "kernel", owner, .. } if owner == cx.infos[1].id),
        "{error}"
    );
    Ok(())
}

/// A kernel that was quick a hundred times and then is not.
fn a_wait_ends_by_its_deadline(cx: &Context) -> Verdict {
    let (kernel, word, lane) = (cx.kernel(0, &kernels::blocking())?, cx.window(0, 4)?, cx.lane(0)?);
    let args = [Arg::Buffer(&word)];
    let launch = [Op::Launch(Launch::new(&kernel, [1; 3], &args)?)];
    word.write(&1_u32.to_le_bytes())?;
    for _ in 0..100 {
        lane.run(&launch)?;
    }
    word.write(&0_u32.to_le_bytes())?;
    let (_, done) = lane.submit(&[], &launch)?;
    let started = Instant::now();
    let outcome = done.wait(MOMENT);
    let took = started.elapsed();
    word.write(&1_u32.to_le_bytes())?;
    assert!(matches!(outcome, Err(WaitError::Timeout { .. })), "{outcome:?}");
    assert!(took < PATIENCE / 2, "it took {took:?}");
    Ok(done.wait(PATIENCE)?)
}

/// The library that cargo built beside this test: `target/PROFILE/examples`.
fn library() -> Result<PathBuf, Failed> {
    let program = std::env::current_exe()?;
    let profile = program.parent().and_then(|deps| deps.parent()).ok_or("the test lies in a folder")?;
    let name = format!("{}library_kernels{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let path = profile.join("examples").join(name);
    if !path.exists() {
        return Err(format!(
            "{} is missing: build it with `cargo build -p warpweft-conformance --examples`",
            path.display()
        )
        .into());
    }
    Ok(path)
}

#[expect(unsafe_code, reason = "loads a library")]
fn from_library(path: PathBuf, kernels: &[&str]) -> KernelCode {
    let contracts = kernels.iter().map(|name| KernelContract::new(*name, [Param::write(4)]));
    // SAFETY: the suite's own library keeps to these contracts; other files hold none of these kernels.
    unsafe { KernelCode::new().with_foreign(contracts, ForeignCode::HostLibrary(path)) }
}

fn runs_from_a_library(cx: &Context) -> Verdict {
    let module = cx.device(0).load(&from_library(library()?, &["double", "fails"]))?;
    assert_eq!(module.format(), CodeFormat::HostLibrary);
    let (double, fails) = (module.kernel("double")?, module.kernel("fails")?);
    drop(module);
    let memory = cx.memory(0, 40)?;
    let args = [Arg::Buffer(&memory)];
    cx.lane(0)?.run(&[Op::Launch(Launch::new(&double, [10, 1, 1], &args)?)])?;
    assert_eq!(cx.download_words(0, &memory)?, (0..20).step_by(2).collect::<Vec<u32>>());
    let (_, done) = cx.lane(0)?.submit(&[], &[Op::Launch(Launch::new(&fails, [1; 3], &args)?)])?;
    let Err(WaitError::Failed(failure)) = done.wait(PATIENCE) else { return Err("it passed".into()) };
    assert!(matches!(&*failure, Failure::KernelFailed { code: -7, .. }), "{failure}");
    Ok(())
}

fn a_library_that_is_not_right_is_named(cx: &Context) -> Verdict {
    let missing = cx.device(0).load(&from_library("no-such-file.so".into(), &["double"])).err();
    assert!(
        matches!(&missing, Some(LoadError::Library { path, .. }) if path == "no-such-file.so"),
        "{missing:?}"
    );
    let lacking = cx.device(0).load(&from_library(library()?, &["triple"])).err();
    assert!(
        matches!(&lacking, Some(LoadError::MissingSymbol { symbol, .. }) if symbol == "triple"),
        "{lacking:?}"
    );
    Ok(())
}

fn outlives_its_module(cx: &Context) -> Verdict {
    let module = cx.device(0).load(&kernels::empty())?;
    let kernel = module.kernel("empty")?;
    let weak = Arc::downgrade(&module);
    drop(module);
    assert!(weak.upgrade().is_none(), "the handle is gone");
    cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [3, 1, 1], &[])?)])?;
    Ok(())
}
