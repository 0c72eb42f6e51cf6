// Of a graph that runs backward: who is going to look at what a node makes.
#ifndef LOWTIDE_NODES_H
#define LOWTIDE_NODES_H

#include <c10/util/ArrayRef.h>

namespace lowtide {

// Whether nobody but ops looks at the bytes of what the node makes that runs in this thread now, and
// what others make of that without looking: nothing of the program's runs in all of this backward (no
// hook, no function), no gradient that is left behind has any of it, and all is on one stream and device.
// So those bytes need not be there before the next op that reads them runs.
bool only_ops_look();

// The same of a sum of those sizes, which autograd makes of what the node and others have made.
bool only_ops_look_at_sum(c10::IntArrayRef sizes);

}  // namespace lowtide
#endif
