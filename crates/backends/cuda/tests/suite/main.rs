//! The backend on a driver that is made of host threads, so that what a GPU does once a year can be asked for.

mod faults;
mod injected;
mod opening;
mod support;
mod visible;
