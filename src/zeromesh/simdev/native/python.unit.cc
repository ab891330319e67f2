// See device.unit.cc.
#include "group.cpp"
#include "module.cpp"
#include "recorder.cpp"
#include "transport.cpp"
