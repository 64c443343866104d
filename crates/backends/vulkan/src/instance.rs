//! The loader, an instance of Vulkan, and what the validation layer says.

use std::{
    ffi::{CStr, c_void},
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use ash::{ext, vk};
use warpweft_core_types::{DriverError, OpenError};

use crate::{
    backend::NAME,
    config::{EntryPoint, VulkanConfig},
};

/// The layer that checks calls.
const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

type List = Mutex<Vec<String>>;

/// What the validation layer said so far, oldest first. Clones share one list, which outlives the backend.
#[derive(Debug, Clone)]
pub struct Messages {
    list: Arc<List>,
    instance: Weak<()>,
}

impl Messages {
    /// The errors and warnings so far.
    pub fn all(&self) -> Vec<String> {
        self.lock().clone()
    }

    /// Whether nothing more will come: the backend is gone, and everything that was opened with it. Work that is under
    /// way keeps its device for a moment longer.
    ///
    /// A program that is about to end waits for this: SwiftShader crashes where a process ends that uses it.
    pub fn are_complete(&self) -> bool {
        self.instance.strong_count() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        // Nothing but a push or a clone runs under the lock.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A vendor call that failed.
pub(crate) fn failed(api: &'static str) -> impl Fn(vk::Result) -> DriverError {
    move |code| DriverError { api, code: i64::from(code.as_raw()), name: format!("{code:?}") }
}

pub(crate) fn unavailable(missing: impl Into<String>) -> OpenError {
    OpenError::Unavailable { backend: NAME, missing: missing.into(), driver: None }
}

/// An instance, as one backend uses it.
pub(crate) struct Instance {
    pub(crate) raw: ash::Instance,
    live: Arc<Live>,
    /// After everything: who sees that it is gone knows that nothing of the driver's runs.
    alive: Arc<()>,
}

/// An instance of the driver's, with the loader it came from.
struct Live {
    raw: ash::Instance,
    messenger: Option<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    messages: Arc<List>,
    /// After the instance: its functions are in the library that this keeps loaded.
    _entry: ash::Entry,
}

/// The instance of all backends that ask for nothing special. It stays: NVIDIA's driver (580.159) can be loaded about
/// thirty times in a process, and the loader unloads drivers with the last instance.
static SHARED: Mutex<Option<Arc<Live>>> = Mutex::new(None);

impl Instance {
    pub(crate) fn create(config: &VulkanConfig) -> Result<Arc<Self>, OpenError> {
        let live = if config.is_plain() { Live::shared(config)? } else { Arc::new(Live::create(config)?) };
        Ok(Arc::new(Self { raw: live.raw.clone(), live, alive: Arc::default() }))
    }

    /// What the layer says from now on, too.
    pub(crate) fn messages(self: &Arc<Self>) -> Messages {
        Messages { list: Arc::clone(&self.live.messages), instance: Arc::downgrade(&self.alive) }
    }

    #[expect(unsafe_code, reason = "asks the loader")]
    pub(crate) fn physical_devices(&self) -> Result<Vec<vk::PhysicalDevice>, OpenError> {
        // SAFETY: the instance is live.
        let devices = unsafe { self.raw.enumerate_physical_devices() };
        match devices {
            // Loaders say so where there is no driver at all.
            Err(vk::Result::ERROR_INITIALIZATION_FAILED | vk::Result::ERROR_INCOMPATIBLE_DRIVER) => {
                Ok(Vec::new())
            }
            devices => devices.map_err(failed("vkEnumeratePhysicalDevices")).map_err(OpenError::Driver),
        }
    }
}

impl Live {
    fn shared(config: &VulkanConfig) -> Result<Arc<Self>, OpenError> {
        // Nothing but the loader and drivers run under the lock.
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = shared.as_ref() {
            return Ok(Arc::clone(live));
        }
        Ok(Arc::clone(shared.insert(Arc::new(Self::create(config)?))))
    }

    #[expect(unsafe_code, reason = "destroys what cannot be used")]
    fn create(config: &VulkanConfig) -> Result<Self, OpenError> {
        let entry = load(config)?;
        let version = version_of(&entry)?;
        if version < vk::API_VERSION_1_1 {
            return Err(unavailable("a Vulkan loader of version 1.1 or newer"));
        }
        if config.validation {
            require_layer(&entry)?;
        }
        let messages = Arc::<List>::default();
        let raw = create(&entry, config, &messages)?;
        let messenger = config.validation.then(|| listen(&entry, &raw, &messages)).transpose();
        let messenger = match messenger {
            Ok(messenger) => messenger,
            Err(error) => {
                // SAFETY: created just now, and nothing was made of it.
                unsafe { destroy(&raw) };
                return Err(OpenError::Driver(error));
            }
        };
        Ok(Self { raw, messenger, messages, _entry: entry })
    }
}

/// The version of the Vulkan loader (major, minor and patch), whether or not there is a driver behind it.
///
/// # Errors
///
/// [`OpenError::Unavailable`] if there is no loader.
pub fn loader_version(config: &VulkanConfig) -> Result<(u32, u32, u32), OpenError> {
    let version = version_of(&load(config)?)?;
    Ok((vk::api_version_major(version), vk::api_version_minor(version), vk::api_version_patch(version)))
}

#[expect(unsafe_code, reason = "loads a library")]
fn load(config: &VulkanConfig) -> Result<ash::Entry, OpenError> {
    if let Some(entry) = config.entry {
        // SAFETY: handles of instances are pointers, so both types are of one function.
        let entry = unsafe { mem::transmute::<EntryPoint, vk::PFN_vkGetInstanceProcAddr>(entry) };
        let functions = ash::StaticFn { get_instance_proc_addr: entry };
        // SAFETY: it is a loader's function by the word of whoever configured it (`with_entry_point`).
        return Ok(unsafe { ash::Entry::from_static_fn(functions) });
    }
    let loaded = match &config.loader {
        // SAFETY: the file is the Vulkan loader by the word of whoever configured it.
        Some(path) => unsafe { ash::Entry::load_from(path) },
        // SAFETY: the system's Vulkan loader has no duties for those who load it.
        None => unsafe { ash::Entry::load() },
    };
    loaded.map_err(|error| {
        let name = config.loader.as_ref().map_or("libvulkan.so.1".into(), |path| path.to_string_lossy());
        unavailable(format!(
            "the Vulkan loader {name} ({error}); it comes with a GPU's driver, and with the package libvulkan1 \
             or vulkan-loader"
        ))
    })
}

#[expect(unsafe_code, reason = "asks the loader")]
fn version_of(entry: &ash::Entry) -> Result<u32, OpenError> {
    // SAFETY: the loader is loaded.
    let version = unsafe { entry.try_enumerate_instance_version() };
    let version = version.map_err(failed("vkEnumerateInstanceVersion")).map_err(OpenError::Driver)?;
    Ok(version.unwrap_or(vk::API_VERSION_1_0))
}

#[expect(unsafe_code, reason = "asks the loader")]
fn require_layer(entry: &ash::Entry) -> Result<(), OpenError> {
    // SAFETY: the loader is loaded.
    let layers = unsafe { entry.enumerate_instance_layer_properties() };
    let layers = layers.map_err(failed("vkEnumerateInstanceLayerProperties")).map_err(OpenError::Driver)?;
    if layers.iter().any(|layer| layer.layer_name_as_c_str() == Ok(VALIDATION)) {
        return Ok(());
    }
    Err(unavailable(
        "the layer VK_LAYER_KHRONOS_validation, which was asked for; it comes with the package \
         vulkan-validationlayers, and VK_LAYER_PATH says where else to look",
    ))
}

#[expect(unsafe_code, reason = "creates an instance")]
fn create(
    entry: &ash::Entry,
    config: &VulkanConfig,
    messages: &Arc<List>,
) -> Result<ash::Instance, OpenError> {
    let application =
        vk::ApplicationInfo::default().application_name(c"warpweft").api_version(vk::API_VERSION_1_3);
    let layers = [VALIDATION.as_ptr()];
    let extensions = [ext::debug_utils::NAME.as_ptr(), ext::validation_features::NAME.as_ptr()];
    let enabled = [vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION];
    let mut features = vk::ValidationFeaturesEXT::default().enabled_validation_features(&enabled);
    let mut messenger = messenger_info(messages);
    let mut info = vk::InstanceCreateInfo::default().application_info(&application);
    if config.validation {
        info = info
            .enabled_layer_names(&layers)
            .enabled_extension_names(&extensions)
            .push_next(&mut features)
            .push_next(&mut messenger);
    }
    // SAFETY: everything `info` points to lives until the call returns; the list of messages lives until the
    // instance is destroyed, since `Instance` holds it.
    let created = unsafe { entry.create_instance(&info, None) };
    created.map_err(|error| match error {
        vk::Result::ERROR_INCOMPATIBLE_DRIVER => unavailable(NO_DRIVER),
        error => OpenError::Driver(failed("vkCreateInstance")(error)),
    })
}

/// What to do where the loader is there and no driver.
pub(crate) const NO_DRIVER: &str = "a Vulkan driver: a GPU's own, or a software one such as lavapipe (package \
                                    mesa-vulkan-drivers); VK_DRIVER_FILES names the manifest of a driver that \
                                    is not installed";

fn messenger_info(messages: &Arc<List>) -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Kind};
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(Severity::ERROR | Severity::WARNING)
        .message_type(Kind::VALIDATION)
        .pfn_user_callback(Some(note))
        .user_data(Arc::as_ptr(messages).cast_mut().cast())
}

#[expect(unsafe_code, reason = "calls the layer")]
fn listen(
    entry: &ash::Entry,
    instance: &ash::Instance,
    messages: &Arc<List>,
) -> Result<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT), DriverError> {
    let functions = ext::debug_utils::Instance::new(entry, instance);
    // SAFETY: the instance is live and was created with the extension; the list of messages outlives it.
    let messenger = unsafe { functions.create_debug_utils_messenger(&messenger_info(messages), None) };
    Ok((functions, messenger.map_err(failed("vkCreateDebugUtilsMessengerEXT"))?))
}

/// Keeps a message. A panic could not leave a function that C calls, and nothing here panics.
///
/// # Safety
///
/// - `data` is what the layer hands to its callbacks.
/// - `user` is the list that `messenger_info` named, and it lives.
#[expect(unsafe_code, reason = "is called from C")]
unsafe extern "system" fn note(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _kind: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer hands out a structure that lives until this returns.
    let text = unsafe { data.as_ref() }.map(|data| data.p_message).filter(|text| !text.is_null());
    // SAFETY: `user` is what `messenger_info` gave, the list that outlives the messenger.
    let list = unsafe { user.cast::<List>().as_ref() };
    if let (Some(text), Some(list)) = (text, list) {
        // SAFETY: it is not null, and a string that ends with a zero by the layer's contract.
        let text = unsafe { CStr::from_ptr(text) };
        list.lock().unwrap_or_else(PoisonError::into_inner).push(text.to_string_lossy().into_owned());
    }
    vk::FALSE
}

/// Destroys an instance.
///
/// # Safety
///
/// - Nothing that was made of it is left, and it is not used again.
#[expect(unsafe_code, reason = "destroys the instance")]
unsafe fn destroy(instance: &ash::Instance) {
    // SAFETY: the caller's word.
    unsafe { instance.destroy_instance(None) };
}

impl Drop for Live {
    #[expect(unsafe_code, reason = "destroys what is the instance's")]
    fn drop(&mut self) {
        if let Some((functions, messenger)) = &self.messenger {
            // SAFETY: created by `listen`, destroyed once; nobody else has the handle.
            unsafe { functions.destroy_debug_utils_messenger(*messenger, None) };
        }
        // SAFETY: devices hold this value, and the messenger is gone; nobody can use it after this.
        unsafe { destroy(&self.raw) };
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Instance")
    }
}
