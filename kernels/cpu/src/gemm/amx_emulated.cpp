// The kernel of amx.cpp on machines without AMX, for tests.
#define DSQ_EMULATED_TILES
#include "amx.cpp"
