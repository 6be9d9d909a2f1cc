// What others ask of autocast; libtorch's own header brings all operators with it.
#pragma once

namespace voltaic {

// Drops the copies of weights that autocast has made on this thread.
void clear_autocast_cache();

} // namespace voltaic
