# What a build makes is kept in QSHARD_KEPT, under a hash of all that determines it (qshard_kept.py), and taken again.
set(QSHARD_KEPT "" CACHE STRING "Folder for what was built, to take it again; empty: none. Builds by pip have build/kept")
if(QSHARD_KEPT)
  cmake_path(ABSOLUTE_PATH QSHARD_KEPT BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/.." NORMALIZE)
endif()

# The compilers' own words: CMake notes a version once, and would not see that a compiler was replaced. The hash of them is a
# macro to all code, so that an old build folder compiles again too. Predefined macros tell what flags such as -march=native
# mean here, and the versions of the C and C++ libraries.
execute_process(COMMAND "${CMAKE_CXX_COMPILER}" --version OUTPUT_VARIABLE cxx_says ERROR_QUIET)
separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
file(WRITE "${CMAKE_BINARY_DIR}/kept/predefined.cc" "#include <cstddef>\n")
# By its name alone: GCC prints macros in an order that can depend on a path, which in pip's builds is another one each time.
execute_process(COMMAND "${CMAKE_CXX_COMPILER}" ${flags} -dM -E predefined.cc WORKING_DIRECTORY "${CMAKE_BINARY_DIR}/kept"
                OUTPUT_VARIABLE predefined ERROR_QUIET)
set(cxx_toolchain "${CMAKE_CXX_COMPILER}\n${cxx_says}${predefined}")
foreach(name IN ITEMS CPATH CPLUS_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX)
  string(APPEND cxx_toolchain "${name}=$ENV{${name}}\n")
endforeach()
set(cuda_toolchain "")
if(with_cuda)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE cuda_says ERROR_QUIET)
  set(cuda_toolchain "${cxx_toolchain}${CMAKE_CUDA_COMPILER}\n${cuda_says}")
  foreach(name IN ITEMS NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS)
    string(APPEND cuda_toolchain "${name}=$ENV{${name}}\n")
  endforeach()
endif()
foreach(language IN ITEMS cxx cuda)
  string(SHA256 hash "${${language}_toolchain}")
  string(SUBSTRING "${hash}" 0 16 hash)
  string(TOUPPER "${language}" upper)
  add_compile_definitions("$<$<COMPILE_LANGUAGE:${upper}>:QSHARD_TOOLCHAIN=0x${hash}>")
endforeach()

# Every setting of CMake that is not known to have no effect: a path in pip's temporary environment, say. A setting too many
# compiles once more than needed; one too few would take a wrong build.
set(cxx_settings "CMake ${CMAKE_VERSION}\n")
set(cuda_settings "")
set(link_settings "")
get_directory_property(variables CACHE_VARIABLES)
list(SORT variables)
foreach(variable IN LISTS variables)
  if(NOT variable MATCHES "^(CMAKE|QSHARD|CUDA)" OR variable MATCHES "^CMAKE_(FIND_|PROJECT_)|^QSHARD_(KEPT|CUDA|CCACHE)$" OR variable MATCHES
     "_(COMMAND|ROOT|PROGRAM|MODULE_PATH|PREFIX_PATH|PREFIX|DIRECTORY|DIR|EXECUTABLE|LAUNCHER|GENERATOR.*|VERBOSE_MAKEFILE)$")
    continue()
  elseif(variable MATCHES "CUDA")
    set(group cuda)
  elseif(variable MATCHES "LINKER_FLAGS|SKIP.*RPATH")
    set(group link)
  else()
    set(group cxx)
  endif()
  string(APPEND ${group}_settings "${variable}=${${variable}}\n")
endforeach()

# qshard_key(NAME TEXT [FILE...]): NAME_key is the hash of TEXT, files and folders, and NAME_kept what is kept under it.
# NAME_is_kept says whether it is there to be taken; a build folder that has objects goes on with them.
function(qshard_key name text)
  set(description "${CMAKE_BINARY_DIR}/kept/${name}.txt")
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" REGEX "^[^/]")
  list(JOIN ARGN "\n" files)
  file(WRITE "${description}" "${text}\n[files]\n${files}")
  execute_process(COMMAND "${Python_EXECUTABLE}" -P "${CMAKE_CURRENT_SOURCE_DIR}/cmake/qshard_kept.py" key "${description}"
                  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE key COMMAND_ERROR_IS_FATAL ANY)
  set(kept "${QSHARD_KEPT}/${name}-${key}")
  set(is_kept OFF)
  if(QSHARD_KEPT AND EXISTS "${kept}" AND NOT EXISTS "${CMAKE_BINARY_DIR}/CMakeFiles/${name}.dir")
    set(is_kept ON)
    file(TOUCH_NOCREATE "${kept}")
  endif()
  set(${name}_key "${key}" PARENT_SCOPE)
  set(${name}_kept "${kept}" PARENT_SCOPE)
  set(${name}_is_kept "${is_kept}" PARENT_SCOPE)
endfunction()

function(qshard_keep name)
  if(QSHARD_KEPT)
    add_custom_command(TARGET ${name} POST_BUILD VERBATIM COMMAND
        "${Python_EXECUTABLE}" -P "${CMAKE_CURRENT_SOURCE_DIR}/cmake/qshard_kept.py" keep
        "${CMAKE_BINARY_DIR}/kept/${name}.txt" ${${name}_key} $<TARGET_FILE:${name}> "${${name}_kept}")
  endif()
endfunction()
