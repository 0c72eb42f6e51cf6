// What lowtide does in a step by a plan, done without Python.
//
// A step that goes by a plan drops, holds and makes again the same values at the same events as the
// one before it. So what Python did in one step is written down, a *tape*: which ops made what, which
// saves lie on which values, and for each event what is dropped and what runs again, in order. While
// a step goes on as rehearsed, this does it.
//
// 1. Nothing is done that Python did not do in the rehearsed step to values made in the same way: an
//    op counts only if its form is the same, and if it reads the very values that it read then.
// 2. A value is dropped only if nobody but the saves kept here can reach its bytes, and if all it is
//    made from is there, unchanged. That is held until the value is back, or nobody wants it.
// 3. Its bytes come back into the storage that they left, so every tensor on it is what it was.
// 4. Whatever is not as rehearsed ends the tape for this step: Python is given all that is known
//    (`hand_over`), in the state that it would have been in had it done all of it, and goes on.
//
// All of this happens with Python's lock held.
#ifndef LOWTIDE_TAPE_H
#define LOWTIDE_TAPE_H

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "form.h"

namespace lowtide::tape {

// A step goes on by it. May be asked without Python's lock.
bool is_on();

// An op has run that is written down: what it was given, and has made. `random`: the state of the
// generator before it, if it draws. False: it is not as rehearsed, and Python is to be told of it.
bool note(const Form& form, std::int64_t number, const std::vector<c10::IValue>& given,
          const c10::IValue* results, std::size_t count, const at::Tensor& random);

// An op that changes what it is given is about to run: whether it reads what it read then. It is noted
// after it has run, as others are.
bool may_write(const Form& form, std::int64_t number, const std::vector<c10::IValue>& given);

// Somebody is about to write there. False: Python has raised.
bool about_to_write(const c10::StorageImpl* storage);

// The step that goes by it, or went last; and whether what is known of it is here.
std::int64_t step();
bool is_known();

// Which value a save of this step lies on; -1: one that the tape has nothing to do with.
int value_of_save(std::int64_t number);
// A tensor on the value is saved. False: it is not what was rehearsed.
bool saved(int value, const c10::StorageImpl* storage);
void unsaved(int value);
// Backward asks for it.
void asked(int value);
bool is_dropped(int value);

// Do what is to be done at an event. False: Python has raised.
bool happen(std::int64_t event);

// Python has all of it from now on, because of that. False: it has raised.
bool hand_over(const char* why);

// The form by which an op with that number is known: in known.cc.
std::shared_ptr<const Form> known_form(std::int64_t number, std::int64_t id);

}  // namespace lowtide::tape

#endif
