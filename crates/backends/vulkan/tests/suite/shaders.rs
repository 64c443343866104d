//! Code that is wrong, hostile, or not what its contract says.

use std::sync::Arc;

use naga::{back::spv, front::wgsl, valid};
use warpweft_core_types::{
    Arg, BufferDesc, CodeFormat, Device, ForeignCode, KernelContract, LoadError, Param,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Need, Test, Verdict, kernel, launch, load, memory, open, words};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "shaders::an_error_names_its_line_and_column", body: an_error_names_its_line_and_column },
    Test { name: "shaders::types_that_the_device_lacks_are_refused", body: types_that_the_device_lacks },
    Test { name: "shaders::what_is_not_in_the_contract_is_refused", body: what_is_not_in_the_contract },
    Test { name: "shaders::scalars_lie_where_the_shader_says", body: scalars_lie_where_the_shader_says },
    Test { name: "shaders::scalars_that_do_not_fit_are_counted", body: scalars_that_do_not_fit_are_counted },
    Test { name: "shaders::spirv_runs", body: spirv_runs },
    Test { name: "shaders::spirv_that_is_cut_or_altered_is_an_error", body: spirv_that_is_cut_or_altered },
    Test { name: "shaders::code_that_nests_deeply_is_read", body: code_that_nests_deeply_is_read },
    Test { name: "shaders::code_that_nests_too_deeply_is_refused", body: code_that_nests_too_deeply },
    Test { name: "shaders::the_functions_of_residents_keep_line_numbers", body: residents_keep_line_numbers },
];

const DOUBLE: &str = "
@group(0) @binding(0) var<storage, read_write> to: array<u32>;
@group(0) @binding(1) var<storage, read> source: array<u32>;
@compute @workgroup_size(4) fn double(@builtin(local_invocation_id) id: vec3<u32>) {
    to[id.x] = source[id.x] * 2u;
}";

fn double() -> KernelContract {
    KernelContract::new("double", [Param::write(16).aligned(4), Param::read(16).aligned(4)])
        .with_workgroup_size([4, 1, 1])
}

fn rejected(result: Result<impl Sized, LoadError>) -> Result<String, Need> {
    match result.err() {
        Some(LoadError::Rejected { log }) => Ok(log),
        Some(error) => Err(error.into()),
        None => Err("it was loaded".into()),
    }
}

fn an_error_names_its_line_and_column() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let none = KernelContract::new("none", []);
    let log =
        rejected(kernel(&device, &none, "@compute @workgroup_size(1)\nfn none() {\n  let x = nothing;\n}"))?;
    assert!(log.contains("3:11") && log.contains("nothing"), "{log}");
    let log =
        rejected(kernel(&device, &none, "@compute @workgroup_size(1)\nfn none() {\n  let x: f32 = 1u;\n}"))?;
    assert!(log.contains("3:"), "{log}");
    Ok(())
}

fn residents_keep_line_numbers() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let resident = KernelContract::new("stays", []).resident();
    let log =
        rejected(kernel(&device, &resident, "\n\n\n@compute @workgroup_size(1) fn stays() { nothing(); }"))?;
    assert!(log.contains("4:"), "{log}");
    let log = rejected(kernel(&device, &resident, "@compute @workgroup_size(1) fn stays() {}"))?;
    assert!(log.contains("ww_begin"), "{log}");
    Ok(())
}

fn types_that_the_device_lacks() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let has = backend.capabilities(0).ok_or("device 0 is there")?;
    let kinds = [
        ("u64", "", has.int64),
        ("f64", "", has.float64),
        ("f16", "enable f16;", has.float16),
        ("u16", "enable wgpu_int16;", has.int16),
    ];
    for (kind, enable, there) in kinds {
        let text = format!(
            "{enable}
            @group(0) @binding(0) var<storage, read_write> to: array<{kind}>;
            @compute @workgroup_size(1) fn add() {{ to[0] = to[0] + to[1]; }}"
        );
        let loaded = kernel(&device, &KernelContract::new("add", [Param::read_write(16)]), &text);
        match loaded {
            Ok(_) => assert!(there, "{kind} was loaded"),
            Err(error) => assert!(!there && matches!(error, LoadError::Rejected { .. }), "{kind}: {error}"),
        }
    }
    Ok(())
}

fn what_is_not_in_the_contract() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let read = || Param::read(16).aligned(4);
    let write = || Param::write(16).aligned(4);
    let size = [4, 1, 1];
    for (params, workgroup, word) in [
        (vec![write(), read()], [5, 1, 1], "workgroups"),
        (vec![write()], size, "binding 1"),
        (vec![read(), read()], size, "writes buffer 0"),
        (vec![write(), write()], size, "reads buffer 1"),
        (vec![Param::write(2), read()], size, "declares 4 bytes"),
        (vec![], size, "binding 0"),
    ] {
        let contract = KernelContract::new("double", params).with_workgroup_size(workgroup);
        let log = rejected(kernel(&device, &contract, DOUBLE))?;
        assert!(log.contains(word), "{log}");
    }
    let log = rejected(kernel(&device, &KernelContract::new("triple", []), DOUBLE))?;
    assert!(log.contains("triple"), "{log}");
    let uniform = "@group(0) @binding(0) var<uniform> x: vec4<u32>;
        @group(0) @binding(1) var<storage, read_write> to: u32;
        @compute @workgroup_size(1) fn main() { to = x.x; }";
    let contract = KernelContract::new("main", [Param::read(16), Param::write(4)]);
    let log = rejected(kernel(&device, &contract, uniform))?;
    assert!(log.contains("Uniform"), "{log}");
    let values = "var<immediate> x: vec2<u32>;
        @group(0) @binding(0) var<storage, read_write> to: u32;
        @compute @workgroup_size(1) fn main() { to = x.y; }";
    let contract = KernelContract::new("main", [Param::write(4), Param::scalar::<u32>()]);
    let log = rejected(kernel(&device, &contract, values))?;
    assert!(log.contains("[8]") && log.contains("[4]"), "{log}");
    Ok(())
}

/// The layout leaves gaps that the contract does not know of.
fn scalars_lie_where_the_shader_says() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let text = "struct Scalars { a: u32, b: vec2<u32>, c: u32, d: vec3<u32>, e: u32 }
        var<immediate> scalars: Scalars;
        @group(0) @binding(0) var<storage, read_write> to: array<u32, 8>;
        @compute @workgroup_size(1) fn main() {
            to[0] = scalars.a; to[1] = scalars.b.x; to[2] = scalars.b.y; to[3] = scalars.c;
            to[4] = scalars.d.x; to[5] = scalars.d.y; to[6] = scalars.d.z; to[7] = scalars.e;
        }";
    let one = Param::scalar::<u32>();
    let params = [one, Param::write(32), Param::scalar::<[u32; 2]>(), one, Param::scalar::<[u32; 3]>(), one];
    let kernel = kernel(&device, &KernelContract::new("main", params), text)?;
    let to = memory(&device, BufferDesc::host_visible(32))?;
    let bytes: Vec<u8> = (1..=8_u32).flat_map(u32::to_le_bytes).collect();
    let scalar = |range: std::ops::Range<usize>| Arg::Scalar(&bytes[range]);
    let args =
        [scalar(0..4), Arg::Buffer(&to), scalar(4..12), scalar(12..16), scalar(16..28), scalar(28..32)];
    launch(&device, &kernel, &args)?;
    assert_eq!(words(&to)?, [1, 2, 3, 4, 5, 6, 7, 8]);
    Ok(())
}

/// What another compiler might have made.
fn compiled() -> Result<Vec<u8>, Need> {
    let module = wgsl::parse_str(DOUBLE)?;
    let mut validator = valid::Validator::new(valid::ValidationFlags::all(), valid::Capabilities::empty());
    let info = validator.validate(&module)?;
    let words = spv::write_vec(&module, &info, &spv::Options::default(), None)?;
    Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
}

fn load_spirv(
    device: &Arc<dyn Device>,
    bytes: Vec<u8>,
) -> Result<Arc<dyn warpweft_core_types::Module>, LoadError> {
    load(device, &double(), ForeignCode::Binary { format: CodeFormat::SpirV, bytes })
}

/// The bytes of the contract fit, and with the gaps that the shader has between them they do not.
fn scalars_that_do_not_fit_are_counted() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let limit = device.limits().scalar_bytes;
    let count = limit / 16 + 1;
    let members: String = (0..count).map(|member| format!("@align(16) m{member}: u32,")).collect();
    let text = format!(
        "struct Scalars {{ {members} }}
        var<immediate> scalars: Scalars;
        @group(0) @binding(0) var<storage, read_write> to: array<u32>;
        @compute @workgroup_size(1) fn gaps() {{ to[0] = scalars.m0; }}"
    );
    let scalars = (0..count).map(|_| Param::scalar::<u32>());
    let params: Vec<Param> = std::iter::once(Param::write(4).aligned(4)).chain(scalars).collect();
    let error = kernel(&device, &KernelContract::new("gaps", params), &text).err().ok_or("it was loaded")?;
    let counted = matches!(
        &error,
        LoadError::ScalarsTooLarge { kernel, size_bytes, limit_bytes }
            if kernel == "gaps" && (*size_bytes, *limit_bytes) == (16 * u64::from(count), limit.into())
    );
    assert!(counted, "{error}");
    Ok(())
}

fn spirv_runs() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let module = load_spirv(&device, compiled()?)?;
    assert_eq!(module.format(), CodeFormat::SpirV);
    let kernel = module.kernel("double")?;
    let to = memory(&device, BufferDesc::host_visible(16))?;
    let from = memory(&device, BufferDesc::host_visible(16))?;
    from.write(&[1_u32, 2, 3, 4].map(u32::to_le_bytes).concat())?;
    launch(&device, &kernel, &[Arg::Buffer(&to), Arg::Buffer(&from)])?;
    assert_eq!(words(&to)?, [2, 4, 6, 8]);
    Ok(())
}

/// None of it reaches the driver unless the checker found it whole; nothing of it is launched.
fn spirv_that_is_cut_or_altered() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let whole = compiled()?;
    let check = |bytes: Vec<u8>| match load_spirv(&device, bytes) {
        Ok(_) | Err(LoadError::Rejected { .. }) => Ok(()),
        Err(error) => Err(Need::from(error)),
    };
    for len in (0..whole.len()).step_by(7) {
        let log = rejected(load_spirv(&device, whole[..len].to_vec()))?;
        assert!(!log.is_empty());
    }
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..400 {
        let mut bytes = whole.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(0..bytes.len());
            bytes[at] = random.u8(..);
        }
        check(bytes)?;
    }
    for _ in 0..100 {
        check((0..random.usize(..400)).map(|_| random.u8(..)).collect())?;
    }
    Ok(())
}

/// Each operator is a call of the reader's, for which the stack of this thread would not do.
fn code_that_nests_deeply_is_read() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let deep = 20_000;
    let wide: Vec<String> = (1..deep).map(|at| format!("const C{at} = C{};", at - 1)).rev().collect();
    let text = format!(
        "@group(0) @binding(0) var<storage, read_write> to: array<u32>;
        {} const C0 = 5u;
        @compute @workgroup_size(1) fn main() {{ to[0] = C{}; to[1] = {}to[2]; }}",
        wide.concat(),
        deep - 1,
        "~".repeat(deep),
    );
    let kernel = kernel(&device, &KernelContract::new("main", [Param::read_write(12).aligned(4)]), &text)?;
    let view = memory(&device, BufferDesc::host_visible(12))?;
    launch(&device, &kernel, &[Arg::Buffer(&view)])?;
    assert_eq!(words(&view)?, [5, 0, 0]);
    Ok(())
}

fn code_that_nests_too_deeply() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let main = "@compute @workgroup_size(1) fn main()";
    let structs: String = (1..300).map(|at| format!("struct S{at} {{ m: S{} }}", at - 1)).collect();
    let branches = "else if x == 1u {}".repeat(1100);
    let long = " ".repeat(600 << 10);
    for (text, word) in [
        (format!("struct S0 {{ m: u32 }} {structs} {main} {{}}"), "255 deep"),
        (format!("{main} {{ var x = 0u; if x == 1u {{}} {branches} }}"), "1023 deep"),
        (format!("{main} {{}} {long}"), "the most that is read"),
    ] {
        let log = rejected(kernel(&device, &KernelContract::new("main", []), &text))?;
        assert!(log.contains(word), "{log}");
    }
    Ok(())
}
